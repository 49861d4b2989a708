"""The part of a job's state that one rank has: the rectangles of layout-free tensors that it consists of, by kinds of
state, and how all ranks adopt a state that was read, or none of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.workers.checkpoint.checksums import DamagedCheckpoint, UnreadableCheckpoint
from manta.workers.checkpoint.durable import FROZEN, KINDS, Rectangles, rectangles_of
from manta.workers.comm.comm import Comm
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointError
from manta.workers.parallel.data.flat import Range


def needed_rectangles(engine: Engine) -> Rectangles:
    """Rectangles of all that the rank keeps."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.held, optimizer.frozen_stored, owned_only=False)


def owned_rectangles(engine: Engine) -> Rectangles:
    """Rectangles that the rank saves; over all ranks each element is saved once."""
    optimizer = engine.optimizer
    return _of_ranges(engine, optimizer.owned, optimizer.frozen_owned, owned_only=True)


def part_lengths(engine: Engine) -> dict[str, int]:
    """Number of elements that the rank keeps, by kind of state."""
    return dict.fromkeys(KINDS, len(engine.optimizer.exp_avg)) | {FROZEN: len(engine.optimizer.frozen)}


def _of_ranges(engine: Engine, trained: list[Range], frozen: Range, owned_only: bool) -> Rectangles:
    optimizer, index = engine.optimizer, engine.comm.index("tensor")
    of_trained = rectangles_of(optimizer.flat, optimizer.held, trained, owned_only, index)
    of_frozen = rectangles_of(optimizer.flat, [optimizer.frozen_stored], [frozen], owned_only, index)
    return dict.fromkeys(KINDS, of_trained) | {FROZEN: of_frozen}


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


def load_parts(engine: Engine, parts: dict[str, torch.Tensor], loss_scale: list[float] | None) -> None:
    """Make `parts` (by KINDS, of the held ranges one after the other, and FROZEN) the state of this
    rank."""
    optimizer = engine.optimizer
    model = parts["model"].split([len(part) for part in optimizer.parameters])
    for live, read in zip(optimizer.state(), [*model, parts["exp_avg"], parts["exp_avg_sq"]], strict=True):
        live.copy_(read)
    optimizer.frozen.copy_(parts["frozen"])
    if engine.loss_scale.dynamic and loss_scale is not None:
        engine.loss_scale.state.copy_(torch.tensor(loss_scale))
