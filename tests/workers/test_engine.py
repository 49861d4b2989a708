"""A step of one rank's engine, told by a stand-in for its pipeline: what it does with numbers that are not finite, and
what it forgets."""

from __future__ import annotations

import math

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank

from manta.workers.comm.grid import state_peers
from manta.workers.engine import Engine
from manta.workers.errors import PeerLost
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.data.loss_scaling import INITIAL
from manta.workers.parallel.data.state import same_state


def engine_of(precision: str = "fp16", rank: int = 0, **sections) -> Engine:
    """Initialised; by default of a job in fp16, the only precision with a loss scale."""
    sections.setdefault("train", {})["precision"] = precision
    job = spec(model={"layers": 2, "hidden_size": 16}, **sections)
    made = Engine(job, lone_rank(job, rank))
    made.initialise(1)
    return made


def step(engine: Engine, *outcomes: tuple[float, float]):
    """A step whose attempts come to these (losses, gradients); also the loss scales that they were made with."""
    scales, left = [], list(outcomes)

    def train(batch, scale, routing):
        loss, gradient = left.pop(0)
        scales.append(scale * 64)
        engine.flat.gradients.fill_(gradient)
        for slot in engine.flat.slots:
            slot.entry.parameter.holds_gradient = True
        return Loss(torch.tensor([loss], dtype=torch.float64), torch.tensor(64.0, dtype=torch.float64), scale)

    engine.pipeline.train = train
    return engine.step([None], 8, 1e-3, 0), scales


def test_overflowing_step_is_retried_until_it_fits():
    engine = engine_of()
    before = engine.optimizer.moments["exp_avg"].clone()
    statistics, scales = step(engine, (64.0, math.inf), (64.0, math.nan), (64.0, 1.0))
    assert scales == [INITIAL, INITIAL / 2, INITIAL / 4]
    assert statistics.finite and statistics.loss == 1.0
    assert engine.loss_scale.state.tolist() == [INITIAL / 4, 1.0], "one good step since"
    assert not torch.equal(engine.optimizer.moments["exp_avg"], before)


@pytest.mark.parametrize("outcome", [(math.nan, 1.0), (math.inf, math.nan)])
def test_a_loss_that_is_lost_is_not_tried_again(outcome):
    engine = engine_of()
    state = [each.clone() for each in engine.state()]
    statistics, scales = step(engine, outcome)
    assert not statistics.finite and scales == [INITIAL]
    assert all(torch.equal(now, then) for now, then in zip(engine.state(), state, strict=True))


def test_engine_step_that_no_scale_helps_changes_no_state():
    engine = engine_of()
    step(engine, (64.0, 1.0))
    state = [each.clone() for each in engine.state()]
    statistics, scales = step(engine, *[(64.0, math.inf)] * 17)
    assert not statistics.finite
    assert scales == [INITIAL / 2**n for n in range(17)]
    assert all(torch.equal(now, then) for now, then in zip(engine.state(), state, strict=True))


@pytest.mark.parametrize("outcome", [(64.0, 1.0), (math.nan, 1.0)], ids=["good", "bad"])
def test_engine_state_is_unsettled_after_a_step_until_it_is_settled(outcome):
    """Whoever dies in between must not be asked for the step before."""
    engine = engine_of("fp32")
    assert engine.settled
    step(engine, outcome)
    assert not engine.settled
    engine.settle()
    assert engine.settled


def test_restarted_engine_begins_with_the_first_loss_scale():
    engine = engine_of()
    first = [each.clone() for each in engine.state()]
    assert any(each.data_ptr() == engine.loss_scale.state.data_ptr() for each in engine.state()), "snapshots keep it"
    step(engine, (64.0, math.inf), (64.0, 1.0))
    assert engine.loss_scale.value == INITIAL / 2
    engine.initialise(1)
    assert all(torch.equal(now, then) for now, then in zip(engine.state(), first, strict=True))


def test_initial_weights_depend_on_the_seed():
    engine = engine_of("fp32")
    first = engine.flat.parameters.clone()
    engine.initialise(2)
    assert not torch.equal(engine.flat.parameters, first)


@pytest.mark.parametrize(("zero", "share"), [(0, 1.0), (1, 0.5)])
def test_zero_splits_the_optimizers_state_over_the_replicas(zero, share):
    engine = engine_of("fp32", rank=1, parallel={"data": 2, "zero": zero})
    assert engine.optimizer.length == engine.flat.size * share


@pytest.mark.parametrize(("zero", "precision"), [(0, "fp16"), (1, "bf16")])
def test_state_parts_tell_what_a_step_changes_and_which_ranks_have_the_same(zero, precision):
    engine = engine_of(precision, rank=1, parallel={"data": 2, "zero": zero}, train={"frozen": ["embedding"]})
    parts = {part.name: part for part in engine.parts()}
    assert list(parts) == ["model", *engine.spec.train.optimizer.moments, "loss_scale", "frozen"]
    assert {name for name, part in parts.items() if part.changes} == {
        *parts.keys() - {"frozen", "loss_scale"},
        *({"loss_scale"} if precision == "fp16" else ()),
    }
    for name, part in parts.items():
        assert part.length == sum(end - start for start, end in part.ranges) or name == "loss_scale"
        assert part.holders == ((0, 1) if not zero or name == "loss_scale" else (1,))
    assert same_state(parts.values()) == state_peers(engine.spec.layout, 1)


def test_buckets_are_as_large_as_the_job_says():
    """In megabytes of gradients, which are fp32."""
    sizes = {}
    for megabytes in (0.002, 0.004, 25):
        flat = engine_of("bf16", parallel={"data": 2, "bucket_megabytes": megabytes}).flat
        sizes[megabytes] = [end - start for start, end in flat.buckets[:-1]]
    assert sizes[0.002][0] == 2000 // 4 // 128 * 128
    assert sizes[0.004][0] == 4000 // 4 // 128 * 128
    assert len(sizes[25]) == 1


@pytest.mark.parametrize(("replicas", "on_gpu", "megabytes"), [(2, False, 25), (2, True, 160), (384, True, 1536)])
def test_buckets_of_gpus_keep_a_link_busy(replicas, on_gpu, megabytes):
    assert (
        spec(parallel={"data": replicas}, train={"global_batch_size": 384}).layout.bucket_bytes(on_gpu)
        == megabytes * 1e6
    )


def test_interrupted_communication_commits_nothing(monkeypatch):
    """On a GPU such a one ends without an error, and with whatever lay in memory; the host learns it only now."""
    engine = engine_of("fp32")
    engine.settle()

    def confirm():
        raise PeerLost("communication was interrupted")

    monkeypatch.setattr(engine.optimizer.comm, "confirm", confirm)
    with pytest.raises(PeerLost):
        step(engine, (64.0, 1.0))
    assert not engine.settled, "the state goes on from a snapshot"
