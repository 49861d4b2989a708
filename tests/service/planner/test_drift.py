"""Where steps differ from their plan, and by how much they may."""

import pytest

from manta.service.planner.drift import (
    GROUPS,
    MEASURED_STEPS,
    SETTLING_STEPS,
    Measured,
    compared,
    drift_of,
    measured_of,
)
from manta.workers.timing.step_phases import PARTS

PLANNED_PARTS = ("arithmetic", "products", "elementwise", "recomputation", "tensor", "host", "bubble", "gradients")
PLANNED_PARTS += ("optimizer", "replicas")


def plan(step=1.0, memory=1000, has_gpus=True, assumed=False):
    """Of which each part takes a tenth."""
    parts = [{"name": name, "seconds": step / 10} for name in PLANNED_PARTS]
    memory_bytes = {"total": memory}
    return {
        "step_seconds": step,
        "parts": parts,
        "memory_bytes": memory_bytes,
        "has_gpus": has_gpus,
        "assumed": assumed,
    }


def took(step=1.0, memory=1000, **parts):
    """A measured step, with seconds by part where some are given."""
    own = {name: parts.get(name, 0.0) for _, names in GROUPS.values() for name in names} if parts else None
    return Measured(6, 25, step, memory, own)


def rows(count, seconds=1.0, tokens=100, first=1):
    return [
        {"step": step, "step_seconds": seconds, "tokens_per_second": tokens / seconds, "memory_bytes": step}
        for step in range(first, first + count)
    ]


def test_drift_groups_cover_all_planned_and_measured_parts():
    measured = {name for _, names in GROUPS.values() for name in names}
    assert measured == set(PARTS)
    only_some_have = {"copies", "context", "expert"}
    assert {name for names, _ in GROUPS.values() for name in names} == set(PLANNED_PARTS) | only_some_have


def test_drift_ignores_first_steps_and_smaller_batches():
    slow, ramp = rows(SETTLING_STEPS, seconds=9.0), rows(3, seconds=0.1, tokens=50, first=SETTLING_STEPS + 1)
    full = rows(4, seconds=1.5, first=SETTLING_STEPS + 4)
    measured = measured_of([*slow, *ramp, *full], 100)
    assert (measured.first_step, measured.last_step, measured.step_seconds) == (9, 12, 1.5)
    assert (measured.memory_bytes, measured.parts) == (12, None)
    assert measured_of(slow, 100) is None and measured_of([*slow, *ramp], 100) is None


def test_drift_parts_are_averaged_over_steps_measured_in_parts():
    some = rows(MEASURED_STEPS)
    for row, seconds in ((some[7], 0.2), (some[17], 0.4)):
        row |= {"forward_seconds": seconds, "bubble_seconds": 0.1}
    measured = measured_of(some, 100)
    assert measured.parts["forward"] == pytest.approx(0.3) and measured.parts["bubble"] == pytest.approx(0.1)
    assert measured.parts["optimizer"] == 0.0


def uneven(in_parts, others=1.0):
    """Twenty steps of `others` seconds, two of which were measured in parts and took `in_parts` each."""
    some = rows(SETTLING_STEPS + MEASURED_STEPS, seconds=others)
    for at in (9, 19):
        times = {"step_seconds": in_parts, "tokens_per_second": 100 / in_parts, "forward_seconds": in_parts - 0.1}
        some[at] |= times | {"bubble_seconds": 0.1}
    return measured_of(some, 100)


def test_drift_names_a_part_only_if_steps_measured_in_parts_are_typical():
    alike = drift_of(plan(), uneven(in_parts=1.4, others=1.3))
    assert (alike.part, alike.ratio) == ("computing", 1.3)
    assert "compute: 1.3 s instead of the planned 0.4 s" in alike.message
    slower, faster = uneven(in_parts=2.6, others=1.3), uneven(in_parts=1.05, others=1.25)
    assert slower.parts is None and faster.parts is not None
    for measured in (slower, faster):
        drift = drift_of(plan(), measured)
        assert drift.part == "step" and "No such step was measured in parts" in drift.message
    assert drift_of(plan(has_gpus=False), uneven(in_parts=2.6)) is None


@pytest.mark.parametrize(("step", "drifts"), [(0.79, True), (0.81, False), (1.0, False), (1.19, False), (1.21, True)])
def test_drift_below_a_fifth_is_tolerated(step, drifts):
    assert (drift_of(plan(), took(step)) is not None) == drifts


def test_drift_names_the_part_with_most_of_the_difference():
    slow = took(2.0, forward=0.2, backward=0.2, tensor_communication=0.9, bubble=0.1, other=0.3)
    drift = drift_of(plan(), slow)
    assert (drift.part, drift.ratio) == ("tensor communication", 2.0)
    assert "Steps take 2 s; the plan said 1 s (+100%)." in drift.message
    assert "0.9 s instead of the planned 0.1 s" in drift.message
    assert "Steps take 83 s; the plan said 1 s (83 times the plan)." in drift_of(plan(), took(82.7)).message
    fast = took(0.5, forward=0.1, backward=0.1, tensor_communication=0.1, bubble=0.1, optimizer=0.1)
    assert drift_of(plan(), fast).part == "computing"
    assert drift_of(plan(), took(2.0)).part == "step"


def test_drift_groups_sum_to_the_planned_and_the_measured_step():
    groups = compared(plan(), took(1.0, forward=0.6, data=0.1, pipeline_communication=0.3))
    assert sum(each.planned for each in groups) == pytest.approx(1.0)
    assert sum(each.measured for each in groups) == pytest.approx(1.0)
    assert compared(plan(), took()) == ()


def test_drift_of_memory_counts_for_gpu_ranks_only():
    assert drift_of(plan(), took(memory=1300)).part == "memory"
    assert drift_of(plan(has_gpus=False), took(memory=1300)) is None
    assert drift_of(plan(), took(memory=1100)) is None
    assert drift_of(plan(), took(memory=None)) is None


def test_times_of_a_machine_that_was_not_measured_never_drift_but_memory_does():
    assert drift_of(plan(assumed=True, has_gpus=False), took(30.0, memory=9000)) is None
    assert drift_of(plan(assumed=True), took(30.0, memory=1300)).part == "memory"
