"""The optimizer's step: what every rank learns about it."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank

from workers.engine import Engine
from workers.parallel.data.step_statistics import Loss


@pytest.mark.parametrize("rank", [0, 1])
def test_the_memory_of_a_step_is_that_of_the_rank_that_uses_most(rank):
    """The other rank uses none here."""
    job = spec(parallel={"data": 2})
    engine = Engine(job, lone_rank(job, rank))
    engine.reduction.begin(1, 8)
    loss = Loss(torch.tensor([64.0], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), 1.0)
    assert engine.optimizer.step(1e-3, loss, memory_bytes=12345).memory_bytes == 12345


def test_training_that_begins_anew_in_the_same_process_has_learned_nothing():
    job = spec()
    engine = Engine(job, lone_rank(job))
    engine.initialise(1)
    first = [each.clone() for each in engine.state()]
    for each in engine.state():
        each.add_(1.0)
    engine.initialise(1)
    assert all(torch.equal(now, before) for now, before in zip(engine.state(), first, strict=True))
