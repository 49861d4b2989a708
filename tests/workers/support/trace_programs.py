"""Programs of ranks that are traced."""

from __future__ import annotations

from typing import Any

import torch

from workers.comm.comm import Comm
from workers.protocol.messages import Resume, TraceOrder
from workers.reporter import Reporter
from workers.spec.reading import parse_job_spec
from workers.trainer import Trainer

Seen = tuple[list[tuple[float, float]], list[Any], list[Any]]
"""Loss and gradient norm of each step, what was reported, bits of the state."""


def train_traced(comm: Comm, document: dict[str, Any], orders: list[TraceOrder]) -> Seen:
    """All steps of a job, of which rank 0 is asked for these traces."""
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    trainer = Trainer(spec, comm, reporter, 1e12)
    trainer.restore(Resume())
    if comm.rank == 0:
        for order in orders:
            comm.trace_orders.ask(TraceOrder(order.number, comm.generation, order.steps, order.first_step))
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
