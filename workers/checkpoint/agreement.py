"""A state that was read is taken over by all ranks, or by none."""

from __future__ import annotations

import torch

from workers.checkpoint.checksums import DamagedCheckpoint
from workers.comm.comm import Comm
from workers.engine import Engine
from workers.errors import CheckpointError

# Of a rank's error message, for the ranks that did not meet the error themselves.
MESSAGE_BYTES = 2048


def agree(comm: Comm, problem: CheckpointError | None) -> None:
    """Raise the problem of the first rank that has one, on all ranks; return when there is none."""
    world = comm.size("world")
    first = torch.tensor([0 if problem is None else world - comm.rank], device=comm.device)
    comm.all_reduce("world", first, largest=True)
    if not first.item():
        return
    told = torch.zeros(1 + MESSAGE_BYTES, dtype=torch.int32, device=comm.device)
    if problem is not None and world - comm.rank == first.item():
        text = str(problem).encode()[:MESSAGE_BYTES]
        told[0] = isinstance(problem, DamagedCheckpoint)
        told[1 : 1 + len(text)] = torch.tensor(list(text))
    comm.all_reduce("world", told)
    message = bytes(told[1:].tolist()).rstrip(b"\0").decode(errors="replace")
    raise (DamagedCheckpoint if told[0] else CheckpointError)(message) from problem


def take_over(engine: Engine, parts: dict[str, torch.Tensor], loss_scale: list[float] | None) -> None:
    """Make `parts` (by durable.KINDS, of the held ranges one after the other) the state of this rank."""
    optimizer = engine.optimizer
    model = parts["model"].split([len(part) for part in optimizer.parameters])
    for live, read in zip(optimizer.state(), [*model, parts["exp_avg"], parts["exp_avg_sq"]], strict=True):
        live.copy_(read)
    if engine.loss_scale.dynamic and loss_scale is not None:
        engine.loss_scale.state.copy_(torch.tensor(loss_scale))
