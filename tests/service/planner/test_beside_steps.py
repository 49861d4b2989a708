"""Validations, snapshots and checkpoints take what their parts say, and are as many as the engine makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.api import schemas
from manta.service.planner import explain
from manta.service.planner.answer import to_json
from manta.service.planner.beside_steps import BesideSteps, beside_steps, validation_seconds
from manta.service.planner.hardware import HOST_COPY, HOST_CORE_COPY, Cluster, Gpu, cpu_machine, machine_of, measured
from manta.service.planner.request import PlanRequest
from manta.service.planner.search import plan_of
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import StepModel, slowest_of
from manta.workers.accounting.state_costs import FREE_SECONDS, STALL_SHARE
from manta.workers.config import JobSpec
from tests.service.support.planned import a100s, job

TINY = {"global_batch_size": 1, "micro_batch_size": 1}
"""A step that is over before its state is copied."""


def model_of(spec: JobSpec, cluster: Cluster | None = None) -> StepModel:
    cluster = cluster or a100s()
    return StepModel(spec, cluster, engine_on(cluster.machine))


def beside(spec: JobSpec, cluster: Cluster | None = None) -> BesideSteps:
    model = model_of(spec, cluster)
    return beside_steps(model, model.time())


def keeping(spec: JobSpec, **checkpoint) -> JobSpec:
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=checkpoint)})


def validated(every: int, batches: int = 8, fraction: float = 0.05, sets: tuple[dict, ...] = (), **layout) -> JobSpec:
    train = {"steps": 10, "validate_every": every, "validation_batches": batches, "micro_batch_size": 2}
    spec = job(train=train, **layout).model_dump()
    spec["data"] |= {"validation_fraction": fraction, "validation": sets}
    return JobSpec.model_validate(spec)


def test_validation_takes_the_time_of_its_forward_passes():
    spec = validated(3, batches=5)
    model = model_of(spec)
    (stage,) = model.pipeline().times
    assert validation_seconds(model) == pytest.approx(5 * spec.micro_batches * stage.forward)
    times = beside_steps(model, model.time())
    assert (times.validations, times.validation) == (4, pytest.approx(4 * validation_seconds(model)))


def test_validation_in_a_pipeline_takes_its_slowest_stage_and_replica():
    spec = validated(3, batches=1, pipeline=4, data=2)
    model, m = model_of(spec), spec.micro_batches
    times = model.pipeline().times
    slowest = max(each.forward for each in times)
    least = m * slowest + sum(each.forward for each in times) - slowest
    slower = slowest_of(2, model.cluster)
    assert least * slower <= validation_seconds(model) < 1.1 * least * slower
    assert slower > 1


@pytest.mark.parametrize(
    ("fraction", "sets", "batches"),
    [
        (0.05, (), 8),
        (0.0, ({"name": "a", "paths": ["a.bin"], "batches": 3},), 3),
        (0.05, ({"name": "a", "paths": ["a.bin"], "batches": 3}, {"name": "b", "paths": ["b.bin"]}), 8 + 3 + 8),
    ],
)
def test_validation_time_counts_the_batches_of_every_validation_set(fraction, sets, batches):
    model = model_of(validated(5, fraction=fraction, sets=sets))
    one = model_of(validated(5, batches=1))
    assert validation_seconds(model) == pytest.approx(batches * validation_seconds(one))


def test_a_host_that_is_slower_than_its_gpu_is_waited_for_in_each_forward():
    gpu = Gpu(2.4e14, 1.5e13, 1.8e14, 1.6e12, 1.2e12, 3e-6, 1e-4, 2e10)
    spec = validated(5, batches=1)
    slow, fast = (
        model_of(spec, Cluster(measured(machine_of("a100"), replace(gpu, host_seconds=seconds)), 1, 1))
        for seconds in (1e-4, 1e-9)
    )
    budgets = slow.passes.budgets(range(spec.model.layers), True, True)
    assert validation_seconds(slow) == pytest.approx(spec.micro_batches * budgets[0].operations * 1e-4)
    assert validation_seconds(fast) == pytest.approx(spec.micro_batches * budgets[0].device_seconds)


def test_activations_that_wait_in_host_memory_do_not_for_a_validation():
    spec = validated(5)
    assert validation_seconds(model_of(validated(5, offload_layers=8))) == validation_seconds(model_of(spec))


def test_snapshot_copy_hides_behind_a_long_step_but_not_a_short_one():
    assert beside(job()).stall_seconds == 0
    spec = job(train=TINY)
    model = model_of(spec)
    time = model.time()
    passes, copy = time.seconds - time.optimizer, 12 * model.parameters / HOST_COPY
    assert beside(spec).stall_seconds == pytest.approx(copy - passes)
    on_host = beside(job(train={**TINY, "optimizer": {"offload": True}})).stall_seconds
    assert on_host == pytest.approx(12 * model.parameters / HOST_CORE_COPY - passes, rel=1e-6)
    gpu = Gpu(2.4e14, 1.5e13, 1.8e14, 1.6e12, 1.2e12, 3e-6, 1e-5, copy=HOST_COPY / 3)
    known = model_of(spec, Cluster(measured(machine_of("a100-80gb"), gpu), 1, 8))
    time = known.time()
    assert beside_steps(known, time).stall_seconds == pytest.approx(3 * copy - (time.seconds - time.optimizer))
    whole, part = (
        beside(job(train={**TINY, "global_batch_size": 2}, data=2, zero=zero)).stall_seconds for zero in (0, 1)
    )
    assert whole - part > 0.3 * copy, "a replica copies the part of the state that it keeps"


def test_snapshot_copy_on_cpu_cores_reads_and_writes_memory():
    spec, machine = job(train=TINY), cpu_machine(1, 1, 2**34)
    slow = replace(machine, core=replace(machine.core, memory=1e6))
    model = model_of(spec, Cluster(slow, 1, 1))
    time = model.time()
    copy = 24 * model.parameters / 1e6
    assert beside_steps(model, time).stall_seconds == pytest.approx(copy - time.seconds + time.optimizer)


def test_planned_snapshot_interval_keeps_stalls_to_their_share():
    spec = job(train={**TINY, "steps": 100_000})
    times, step = beside(spec), model_of(spec).time().seconds
    assert times.stall_seconds > FREE_SECONDS
    assert times.snapshot_every > 1
    assert times.snapshot <= STALL_SHARE * times.steps_seconds
    assert times.snapshots == 100_000 // times.snapshot_every
    often = beside(keeping(spec, snapshot_every_steps=1))
    assert (often.snapshots, often.snapshot) == (100_000, pytest.approx(100_000 * times.stall_seconds))
    assert times.steps_seconds == pytest.approx(100_000 * step)


@pytest.mark.parametrize("steps", [1, 12, 25])
@pytest.mark.parametrize("every", [0, 1, 4, 6, 30])
@pytest.mark.parametrize("snapshot_every", [1, 4, 5])
def test_planned_checkpoints_without_a_snapshot_of_their_step_are_copied(steps, every, snapshot_every):
    spec = keeping(job(train={"steps": steps}), every_steps=every, snapshot_every_steps=snapshot_every)
    due = [step for step in range(1, steps + 1) if every and (step % every == 0 or step == steps)]
    times = beside(spec)
    assert times.checkpoints == len(due)
    assert times.copied_checkpoints == sum(step % snapshot_every != 0 for step in due)
    without = beside(keeping(spec, snapshots="off"))
    assert (without.snapshots, without.snapshot_every, without.copied_checkpoints) == (0, 0, len(due))
    assert (times.storage_rate is None) == (len(due) < 2)


def test_frozen_parameters_are_left_out_of_snapshot_copies():
    model = {"vocabulary_size": 500}
    whole, half = (beside(job(model=model, train=TINY | {"frozen": frozen})) for frozen in ((), ("layers.0-3",)))
    assert whole.stall_seconds - half.stall_seconds > 0.4 * 12 * model_of(job(model=model)).parameters / HOST_COPY


def test_planned_hours_include_validation_snapshots_and_checkpoints():
    spec = keeping(job(train={**TINY, "steps": 100, "validate_every": 10}), every_steps=7, snapshot_every_steps=3)
    times = beside(spec)
    assert times.copied_checkpoints == 15 - 4 and times.stall_seconds > 0
    assert times.checkpoint == 11 * times.stall_seconds
    request = PlanRequest(spec, a100s())
    (plan,) = to_json(request, request.answer())["plans"]
    seconds = times.steps_seconds + times.validation + times.snapshot + times.checkpoint
    assert plan["gpu_hours"] == plan["hours"] == pytest.approx(seconds / 3600)
    assert schemas.BesideSteps.model_validate(plan["beside_steps"]).model_dump() == times.to_json()
    assert times.to_json()["validation_hours"] == pytest.approx(times.validation / 3600)
    assert {**times.to_json(), "snapshot_hours": times.snapshot / 3600} == times.to_json()


def test_storage_rate_writes_one_checkpoint_between_two():
    spec = keeping(job(train={"steps": 100}), every_steps=10)
    times = beside(spec)
    assert times.storage_rate * 10 * model_of(spec).time().seconds == pytest.approx(times.checkpoint_bytes)


def test_plan_sentences_mention_only_validation_snapshots_and_checkpoints_in_use():
    assert beside(keeping(job(), every_steps=0)).sentences() == ()
    long = {**TINY, "steps": 1000, "validate_every": 100}
    validation, snapshot, checkpoint = beside(job(train=long)).sentences()
    assert "10 validations" in validation and "for the snapshot before it" in snapshot and "storage" in checkpoint
    plan = plan_of(job(train=long), a100s())
    assert explain.to_json(explain.explain(plan, a100s()))["sentences"][-3:] == [validation, snapshot, checkpoint]


def test_long_run_hours_include_validation_snapshots_and_checkpoints():
    spec = job(train={"steps": 2_000_000, "validate_every": 100, "micro_batch_size": 2})
    run = explain.explain(plan_of(spec, a100s()), a100s()).run
    times = beside(spec)
    assert run is not None
    assert run.outcome.beside_steps == pytest.approx(times.seconds)
    assert run.outcome.training == pytest.approx(times.steps_seconds)
    assert run.outcome.seconds > times.seconds + times.steps_seconds
