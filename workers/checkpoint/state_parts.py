"""The part of a job's state that one rank has: the rectangles of layout-free tensors that it consists of, by the names
of its parts, and how all ranks adopt a state that was read, or none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from manta.workers.checkpoint.checksums import DamagedCheckpoint, UnreadableCheckpoint
from manta.workers.checkpoint.durable import Rectangles, rectangles_of
from manta.workers.comm.comm import Comm
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointError


def needed_rectangles(engine: Engine) -> Rectangles:
    """Rectangles of all that the rank keeps."""
    return _rectangles(engine, owned_only=False)


def owned_rectangles(engine: Engine) -> Rectangles:
    """Rectangles that the rank saves; over all ranks each element is saved once."""
    return _rectangles(engine, owned_only=True)


def part_lengths(engine: Engine) -> dict[str, int]:
    """Number of elements that the rank keeps, by the part's name."""
    return {part.name: part.length for part in engine.parts()}


def _rectangles(engine: Engine, owned_only: bool) -> Rectangles:
    flat, index = engine.flat, engine.comm.index("tensor")
    # Weights and moments are of the same ranges, whose rectangles take a while to find.
    alike = {part.ranges: part.saved if owned_only else part.ranges for part in engine.parts() if part.ranges}
    found = {ranges: rectangles_of(flat, ranges, wanted, owned_only, index) for ranges, wanted in alike.items()}
    return {part.name: found[part.ranges] for part in engine.parts() if part.ranges}


@dataclass(frozen=True)
class _Problem:
    """A rank's error from reading its part."""

    message: str
    kind: str
    """The exception to raise."""


_KINDS: dict[str, type[CheckpointError]] = {
    "damaged": DamagedCheckpoint,
    "unreadable": UnreadableCheckpoint,
    "other": CheckpointError,
}


def agree(comm: Comm, problem: CheckpointError | None) -> None:
    """Raise the problem of the first rank that has one, on all ranks; return if there is none. Called on the training
    thread. Raises PeerLost."""
    own_problem = None if problem is None else _Problem(str(problem), _kind_of(problem))
    first = comm.shared_work.together(lambda: own_problem, _first, (_Problem | None, _Problem | None), comm.progress)
    if first is not None:
        raise _KINDS.get(first.kind, CheckpointError)(first.message) from problem


def _kind_of(problem: CheckpointError) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(problem, kind))


def _first(problems: list[_Problem | None]) -> list[_Problem | None]:
    """The first problem of all ranks, on every rank."""
    first = next((problem for problem in problems if problem is not None), None)
    return [first] * len(problems)


def load_parts(engine: Engine, read: Mapping[str, torch.Tensor]) -> None:
    """Make what was `read` the state of this rank: all elements of parts, by the part's name. Small parts that no step
    changes are as this job has them, whatever was read."""
    for part in engine.parts():
        if part.name in read and (part.ranges or part.changes):
            for live, values in zip(part.tensors, part.split(read[part.name]), strict=True):
                live.copy_(values)
