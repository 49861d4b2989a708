"""Programs of ranks that are traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from manta.workers.comm.comm import Comm
from manta.workers.protocol.messages import Resume, TraceOrder
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import Trainer
from manta.workers.training import tracing
from manta.workers.training.reporter import Reporter

Seen = tuple[list[tuple[float, float]], list[Any], list[Any]]
"""Loss and gradient norm of each step, what was reported, bits of the state."""


def train_traced(
    comm: Comm,
    document: dict[str, Any],
    orders: list[TraceOrder],
    all_are_asked: bool = False,
    most_profile_bytes: int = tracing.MAX_BYTES,
) -> Seen:
    """All steps of a job, of which rank 0, or with `all_are_asked` each, is asked for these traces."""
    with mock.patch.object(tracing, "MAX_BYTES", most_profile_bytes):
        return _train_traced(comm, document, orders, all_are_asked)


def _train_traced(comm: Comm, document: dict[str, Any], orders: list[TraceOrder], all_are_asked: bool) -> Seen:
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    trainer = Trainer(spec, comm, reporter, 1e12)
    trainer.restore(Resume())
    for order in orders if comm.rank == 0 or all_are_asked else ():
        comm.requests.traces.add(replace(order, generation=comm.generation))
    curve: list[tuple[float, float]] = []
    train_step = trainer.train_step

    def step() -> Any:
        statistics = train_step()
        curve.append((statistics.loss, statistics.grad_norm))
        return statistics

    trainer.train_step = step  # type: ignore[method-assign]
    trainer.train()
    reporter.close()
    state = torch.cat([part.view(torch.uint8) for part in trainer.engine.state()])
    return curve, [message.payload for message in messages], [state.numpy().tobytes()]
