"""Agreement of all ranks on a state that was read: all of them adopt it, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.checkpoint.checksums import DamagedCheckpoint, UnreadableCheckpoint
from workers.comm.comm import Comm
from workers.engine import Engine
from workers.errors import CheckpointError


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
    mine = None if problem is None else _Problem(str(problem), _kind_of(problem))
    first = comm.shared_work.together(lambda: mine, _first, (_Problem | None, _Problem | None), comm.progress)
    if first is not None:
        raise _KINDS.get(first.kind, CheckpointError)(first.message) from problem


def _kind_of(problem: CheckpointError) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(problem, kind))


def _first(problems: list[_Problem | None]) -> list[_Problem | None]:
    """The first problem of all ranks, on every rank."""
    first = next((problem for problem in problems if problem is not None), None)
    return [first] * len(problems)


def take_over(engine: Engine, parts: dict[str, torch.Tensor], loss_scale: list[float] | None) -> None:
    """Make `parts` (by durable.KINDS, of the held ranges one after the other, and durable.FROZEN) the state of this
    rank."""
    optimizer = engine.optimizer
    model = parts["model"].split([len(part) for part in optimizer.parameters])
    for live, read in zip(optimizer.state(), [*model, parts["exp_avg"], parts["exp_avg_sq"]], strict=True):
        live.copy_(read)
    optimizer.frozen.copy_(parts["frozen"])
    if engine.loss_scale.dynamic and loss_scale is not None:
        engine.loss_scale.state.copy_(torch.tensor(loss_scale))
