"""Jobs whose machine is not as it is assumed say so by their steps, and plans get better by that."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from manta.service.planner.drift import GROUPS, Measured
from manta.service.planner.hardware import ASSUMED_CORE, MACHINES, Cluster, CpuNode, Gpu, Links, measured
from manta.service.planner.job_plan import planned
from manta.service.planner.refinement import (
    BETWEEN_GPUS,
    MAX_FACTOR,
    MAX_JOBS,
    MIN_JOBS,
    ON_CORES,
    Observation,
    Row,
    constants_of,
    movable,
    moved,
    observation,
    refined,
    with_constants,
)
from manta.workers.spec.reading import parse_job_spec

CORES = CpuNode(4, 2.0**36)
GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
OF_CORES = Cluster(CORES.machine(4), 1, 4)
OF_H100 = Cluster(MACHINES["h100-80gb"], 2, 8)
OF_MEASURED = Cluster(measured(MACHINES["h100-80gb"], GPU), 2, 8)


def on_cores(draw):
    """A small job for one node of four places."""
    parallel = draw.choice([{}, {}, {"tensor": 2}, {"data": 2}, {"pipeline": 2}, {"tensor": 2, "data": 2}])
    hidden = draw.choice([64, 128, 256, 512])
    model = {"layers": draw.choice([2, 4]), "hidden_size": hidden, "heads": 4, "vocabulary_size": 512}
    return document(draw, model | {"sequence_length": draw.choice([32, 128, 256])}, parallel, "fp32")


def on_gpus(draw):
    """A job for two nodes of eight GPUs."""
    parallel = draw.choice([{"tensor": 4}, {"tensor": 8, "data": 2}, {"tensor": 2, "pipeline": 2, "data": 4}])
    hidden = draw.choice([1024, 2048, 4096])
    model = {"layers": draw.choice([16, 24]), "hidden_size": hidden, "heads": 16, "vocabulary_size": 51200}
    return document(draw, model | {"sequence_length": draw.choice([1024, 2048])}, parallel, "bf16")


def document(draw, model, parallel, precision):
    size, count = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    batch = {"micro_batch_size": size, "global_batch_size": size * count * parallel.get("data", 1)}
    data = {"source": "megatron", "paths": ["corpus.bin"]}
    train = {"steps": 100, "precision": precision, **batch}
    return parse_job_spec({"model": model, "data": data, "train": train, "parallel": parallel})


def slower(cluster, **factors):
    """The cluster with constants that are so many times what they are."""
    now = constants_of(cluster.machine)
    return replace(cluster, machine=with_constants(cluster.machine, {n: now[n] * f for n, f in factors.items()}))


def took(spec, cluster, noise=lambda: 1.0, spread=0.02):
    """What steps of `spec` would take on `cluster`, as they are measured."""
    plan = planned(spec, cluster)
    seconds = {part["name"]: part["seconds"] for part in plan["parts"]}
    parts = dict.fromkeys((name for _, names in GROUPS.values() for name in names), 0.0)
    for ours, theirs in GROUPS.values():
        parts[theirs[0]] = sum(seconds.get(name, 0.0) for name in ours) * noise()
    return Measured(6, 25, sum(parts.values()), None, parts, spread)


def observed(spec, planned_on, true, name="job_1", **how):
    kept = json.loads(json.dumps(planned(spec, planned_on)))
    return observation(name, 0.0, kept, took(spec, true, **how))


def step(spec, cluster):
    return planned(spec, cluster)["step_seconds"]


def errors(specs, cluster, true):
    """Of predictions on `cluster`, as logarithms."""
    return [abs(math.log(step(spec, cluster) / step(spec, true))) for spec in specs]


CASES = [
    (OF_CORES, on_cores, {"product_fp32": 0.4, "memory": 0.5, "operation_seconds": 2.5, "link": 0.4}),
    (OF_CORES, on_cores, {"product_fp32": 2.0, "memory": 0.6, "message_seconds": 3.0}),
    (OF_CORES, on_cores, {"product_fp32": 0.3}),
    (OF_H100, on_gpus, {"product": 0.7, "inside": 0.4}),
    (OF_H100, on_gpus, {"product": 1.3, "memory": 0.6, "skew_seconds": 2.0}),
    (OF_MEASURED, on_gpus, {"inside": 0.4}),
]


def noisy(draw, deviation=0.03):
    return lambda: math.exp(draw.gauss(0, deviation))


def seen_on(case, draw, count=10, disturbed=2):
    """What jobs say of a machine that is not as it is assumed, some of them three times too slow all over."""
    assumed, drawn, factors = CASES[case]
    true = slower(assumed, **factors)
    seen = [observed(drawn(draw), assumed, true, f"job_{i}", noise=noisy(draw)) for i in range(count)]
    return seen + [observed(drawn(draw), assumed, true, f"job_w{i}", noise=lambda: 3.0) for i in range(disturbed)]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_refined_constants_bring_plans_of_other_jobs_close_to_measurements(case, seed):
    assumed, drawn, factors = CASES[case]
    draw, true = random.Random(100 * case + seed), slower(assumed, **factors)
    after = replace(assumed, machine=refined(assumed.machine, seen_on(case, draw)))
    constants, was = constants_of(after.machine), movable(assumed.machine)
    first, factor = next(iter(factors.items()))
    assert abs(math.log(constants[first] / was[first] / factor)) < (0.25 if seed == 1 else 0.5)
    others = [drawn(draw) for _ in range(10)]
    before_errors, after_errors = errors(others, assumed, true), errors(others, after, true)
    assert statistics.median(after_errors) < min(0.1, 0.75 * statistics.median(before_errors))
    assert all(now < before + 0.15 for before, now in zip(before_errors, after_errors, strict=True))


@pytest.mark.parametrize("case", [0, 3])
def test_refinement_does_not_depend_on_the_order_of_jobs(case):
    machine, seen = CASES[case][0].machine, seen_on(case, random.Random(5), 8, 1)
    after = refined(machine, seen)
    assert after.refined.jobs == 9
    assert refined(machine, seen[::-1]) == refined(machine, random.Random(1).sample(seen, len(seen))) == after


def test_refinement_leaves_a_machine_unchanged_that_matches_its_assumptions():
    draw = random.Random(1)
    after = refined(OF_CORES.machine, [observed(on_cores(draw), OF_CORES, OF_CORES, f"job_{i}") for i in range(6)])
    assert constants_of(after) == pytest.approx(movable(OF_CORES.machine), rel=1e-6)


def test_refinement_is_stable_for_jobs_planned_with_refined_constants():
    """What was refined stays so while the jobs that say so were planned by it."""
    draw = random.Random(3)
    specs, true = [on_cores(draw) for _ in range(8)], slower(OF_CORES, product_fp32=0.4, memory=0.5)

    def refined_by(planned_on):
        seen = [observed(spec, planned_on, true, f"job_{i}") for i, spec in enumerate(specs)]
        return replace(OF_CORES, machine=refined(OF_CORES.machine, seen))

    first = refined_by(OF_CORES)
    second = refined_by(first)
    assert first.machine.refined and second.machine.refined.before == tuple(movable(OF_CORES.machine).items())
    assert constants_of(second.machine) == pytest.approx(constants_of(first.machine), rel=0.05)
    assert refined(first.machine, []) == first.machine


def one(model, parallel=None, precision="fp32"):
    """Any job of such a model."""
    return document(random.Random(1), {"layers": 2, "vocabulary_size": 512, **model}, parallel or {}, precision)


SPEC = one({"hidden_size": 256, "heads": 4, "sequence_length": 128})


def test_refinement_changes_constants_only_after_a_minimum_number_of_jobs():
    true = slower(OF_CORES, product_fp32=0.5)
    seen = [observed(SPEC, OF_CORES, true, f"job_{i}") for i in range(MIN_JOBS)]
    assert refined(OF_CORES.machine, seen[1:]) is OF_CORES.machine
    after = refined(OF_CORES.machine, seen)
    assert {name for name, factor in moved(after).items() if abs(factor - 1) > 1e-6} == {"product_fp32"}
    assert after.refined.jobs == MIN_JOBS


def test_refinement_counts_only_the_newest_jobs():
    true = slower(OF_CORES, product_fp32=0.5)
    old = [observed(SPEC, OF_CORES, OF_CORES, f"job_a{i:02}") for i in range(MAX_JOBS)]
    new = [observed(SPEC, OF_CORES, true, f"job_b{i:02}") for i in range(MAX_JOBS)]
    assert refined(OF_CORES.machine, old + new) == refined(OF_CORES.machine, new)


def test_refinement_moves_a_constant_by_a_bounded_factor():
    seen = [observed(SPEC, OF_CORES, slower(OF_CORES, product_fp32=0.01), f"job_{i}") for i in range(9)]
    assert moved(refined(OF_CORES.machine, seen))["product_fp32"] == pytest.approx(1 / MAX_FACTOR)


def test_refinement_never_raises_a_share_of_the_data_sheet_above_one():
    draw = random.Random(1)
    seen = [observed(on_gpus(draw), OF_H100, slower(OF_H100, product=2.0), f"job_{i}") for i in range(6)]
    assert constants_of(refined(OF_H100.machine, seen))["product"] == 1.0


def test_refinement_of_core_memory_bandwidth_is_not_capped_at_one():
    row = Row(measured=0.5, rest=0.0, by_constant={"memory": 1.0}, share=1.0)
    before = movable(OF_CORES.machine)
    seen = [Observation(f"job_{i}", 0.0, before, (row,)) for i in range(MIN_JOBS)]
    assert moved(refined(OF_CORES.machine, seen))["memory"] == pytest.approx(2.0, rel=0.1)


def test_refinement_ignores_steps_with_a_wide_spread_or_without_parts():
    plan = planned(SPEC, OF_CORES)
    assert observation("job_1", 0.0, plan, took(SPEC, OF_CORES)) is not None
    assert observation("job_1", 0.0, plan, took(SPEC, OF_CORES, spread=0.4)) is None
    assert observation("job_1", 0.0, plan, took(SPEC, OF_CORES, spread=None)) is None
    assert observation("job_1", 0.0, plan, replace(took(SPEC, OF_CORES), parts=None)) is None


def test_refinement_ignores_a_small_part_of_a_step():
    """The update is one part in a hundred."""
    rows = observed(SPEC, OF_CORES, OF_CORES).rows
    assert [row.planned == pytest.approx(row.measured) for row in rows] == [True]
    assert rows[0].share > 0.9
    step = took(SPEC, OF_CORES)
    waited = step.parts | {"forward": 0.01 * step.step_seconds, "bubble": 0.99 * step.step_seconds}
    assert observation("job_1", 0.0, planned(SPEC, OF_CORES), replace(step, parts=waited)) is None, "small as it was"


def test_refinement_leaves_measured_constants_unchanged():
    core = replace(ASSUMED_CORE, product_fp32=9e10)
    assert movable(CpuNode(4, 2.0**36, core).machine(4)) == {}
    assert set(movable(OF_CORES.machine)) == set(ON_CORES)
    assert set(movable(OF_MEASURED.machine)) == set(BETWEEN_GPUS)
    after = refined(OF_MEASURED.machine, seen_on(5, random.Random(2)))
    assert after.refined and after.gpu == GPU
    assert after.constants.product == OF_MEASURED.machine.constants.product


def test_refinement_leaves_measured_link_bandwidth_unchanged():
    linked = replace(OF_MEASURED, machine=measured(MACHINES["h100-80gb"], GPU, Links(3.6e11, 3e-6)))
    assert set(movable(linked.machine)) == {*BETWEEN_GPUS} - {"inside"}
    draw, true = random.Random(2), slower(linked, skew_seconds=2.0)
    seen = [each for each in (observed(on_gpus(draw), linked, true, f"job_{i}") for i in range(6)) if each]
    after = refined(linked.machine, seen)
    assert set(moved(after)) == {"skew_seconds"} and moved(after)["skew_seconds"] > 1.3
    assert after.links == linked.machine.links


@pytest.mark.parametrize("again", [{"product_16bit": 5e14}, {"memory": 2e12}])
def test_refinement_ignores_jobs_from_before_a_second_calibration(again):
    """What they were planned to take went by constants that no longer hold."""
    seen = seen_on(5, random.Random(2))
    assert refined(OF_MEASURED.machine, seen).refined
    other = measured(MACHINES["h100-80gb"], replace(GPU, **again))
    assert refined(other, seen) is other
    linked = measured(MACHINES["h100-80gb"], GPU, Links(3.6e11, 3e-6))
    assert refined(linked, seen) is linked
    seen = [observed(SPEC, OF_CORES, slower(OF_CORES, product_fp32=0.5), f"job_{i}") for i in range(9)]
    other = CpuNode(4, 2.0**36, replace(ASSUMED_CORE, memory=3e10)).machine(4)
    assert refined(other, seen) is other


def test_refinement_derives_bandwidth_from_large_and_latency_from_small_messages():
    def tells(hidden, sequence):
        spec = one({"hidden_size": hidden, "heads": 16, "sequence_length": sequence}, {"tensor": 8}, "bf16")
        return planned(spec, OF_H100)["dependence"]["seconds"]["tensor communication"]

    large, small = tells(8192, 4096), tells(512, 512)
    assert large["inside"] > 2 * large["skew_seconds"] and small["skew_seconds"] > 2 * small["inside"]


def waiting_instead(measured, part):
    """The same step, of whose computing a part was waited for."""
    moved = part * measured.parts["forward"]
    parts = measured.parts | {"forward": measured.parts["forward"] - moved, "bubble": measured.parts["bubble"] + moved}
    return replace(measured, parts=parts)


def test_refinement_uses_whole_steps_if_their_parts_do_not_add_up():
    """While a rank waits for another on the same cores, that one has them to itself."""
    draw, true = random.Random(3), slower(OF_CORES, product_fp32=0.5)
    specs = [on_cores(draw) for _ in range(16)]
    kept = [json.loads(json.dumps(planned(spec, OF_CORES))) for spec in specs[:8]]
    seen = [
        observation(f"job_{i}", 0.0, plan, waiting_instead(took(spec, true), 0.2))
        for i, (spec, plan) in enumerate(zip(specs[:8], kept, strict=True))
    ]
    after = replace(OF_CORES, machine=refined(OF_CORES.machine, seen))
    assert statistics.median(errors(specs[8:], after, true)) < 0.05


def test_refinement_ignores_whole_steps_if_the_compute_was_measured():
    draw = random.Random(4)
    for assumed, drawn, whole in ((OF_CORES, on_cores, True), (OF_H100, on_gpus, True), (OF_MEASURED, on_gpus, False)):
        seen = [observed(drawn(draw), assumed, assumed) for _ in range(6)]
        assert {each.whole is not None for each in seen if each} == {whole}
