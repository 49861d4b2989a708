"""The optimizer's step: what every rank learns about it."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank

from manta.workers.engine import Engine
from manta.workers.parallel.data.agreement import Loss
from manta.workers.protocol.requests import Asked, SaveAndEnd


@pytest.mark.parametrize("rank", [0, 1])
def test_the_memory_of_a_step_is_that_of_the_rank_that_uses_most(rank):
    """The other rank uses none here."""
    job = spec(parallel={"data": 2})
    engine = Engine(job, lone_rank(job, rank))
    engine.reduction.begin(1, 8)
    loss = Loss(torch.tensor([64.0], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), 1.0)
    assert engine.optimizer.step(1e-3, loss, memory_bytes=12345).memory_bytes == 12345


def test_restarted_initialisation_in_the_same_process_forgets_earlier_training():
    job = spec()
    engine = Engine(job, lone_rank(job))
    engine.initialise(1)
    first = [each.clone() for each in engine.state()]
    for each in engine.state():
        each.add_(1.0)
    engine.initialise(1)
    assert all(torch.equal(now, before) for now, before in zip(engine.state(), first, strict=True))


def test_zero_optimizer_asks_for_copies_before_it_agrees_to_the_update():
    """Once it has agreed, another rank may have its new state already, and all must be able to get there."""
    job = spec()
    engine, happened = Engine(job, lone_rank(job)), []
    engine.initialise(1)
    optimizer = engine.optimizer

    def noting(name, method):
        def call(*arguments):
            happened.append(name)
            return method(*arguments)

        return call

    optimizer.reduction.finish = noting("reduced", optimizer.reduction.finish)
    optimizer.sums.agree = noting("agreed", optimizer.sums.agree)
    optimizer._update = noting("updated", optimizer._update)
    engine.reduction.begin(1, 8)
    loss = Loss(torch.tensor([64.0], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), 1.0)
    optimizer.step(1e-3, loss, 0, lambda: happened.append("asked"))
    assert happened == ["reduced", "asked", "agreed", "updated"]


def test_statistics_tell_each_ranks_own_time_whether_anything_changed_and_whether_to_end():
    job = spec(parallel={"data": 2})
    engine = Engine(job, lone_rank(job, 1))
    engine.initialise(1)

    def statistics(loss: float, tokens: float = 64.0):
        engine.comm.step.begin(1)
        engine.reduction.begin(1, 8)
        engine.flat.gradients.zero_()  # nothing comes from the other replica, which is not there
        agreed_loss = Loss(torch.tensor([loss], dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64), 1.0)
        return engine.optimizer.step(1e-3, agreed_loss, memory_bytes=10**9)

    good, bad = statistics(128.0), statistics(float("nan"))
    assert (good.loss, good.updated, good.asked) == (2.0, True, Asked())
    assert not bad.updated
    assert statistics(0.0, tokens=0.0).loss == 0.0, "no token has a target"
    assert good.own_seconds[0] == 0.0 < good.own_seconds[1] < 1e6, "not its memory"
    engine.optimizer.limits = (1.9, 100.0)
    assert not statistics(128.0).updated
    engine.comm.requests.add(SaveAndEnd(engine.comm.generation))
    assert statistics(64.0).asked == Asked(end=1)
    engine.comm.requests.saving = True
    assert statistics(64.0).asked == Asked(end=1, saving=1)


def test_loaded_weights_reach_both_computation_and_optimizer():
    """Also with 16 bits, where they are not the same numbers."""
    for precision, rank in (("fp32", 0), ("bf16", 0), ("bf16", 1)):
        job = spec(train={"precision": precision}, parallel={"data": 2})
        engine = Engine(job, lone_rank(job, rank))
        values = torch.arange(float(engine.flat.size)) / 3
        engine.optimizer.load_range(0, values)
        assert torch.equal(engine.flat.parameters, values.to(engine.flat.parameters.dtype))
        held = torch.cat([values[start:end] for start, end in engine.flat.parts(rank)])
        assert torch.equal(torch.cat(engine.optimizer.parameters), held)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 2)])
def test_frozen_parameters_are_kept_whole_where_the_state_is(zero, parts):
    """Replicas with the same state may use each other's snapshots, which must have the same frozen parameters."""
    job = spec(train={"frozen": ["embedding"]}, parallel={"data": 2, "zero": zero})
    for rank in (0, 1):
        engine = Engine(job, lone_rank(job, rank))
        (frozen,) = engine.optimizer.frozen_parts()
        assert frozen.length == (engine.flat.total_size - engine.flat.size) // parts > 0
