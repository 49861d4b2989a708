"""Where the time of a step goes, as measured and as planned."""

import pytest
from drawn_schedules import SECONDS, SHAPES
from engine_specs import spec
from hypothesis import given
from simulated_traces import grid_of, timeline_of, trace_of

from benchmarks.support.timeline import PassTimes
from manta.service.planner.budget import Share
from manta.service.planner.hardware import Cluster, machine_of
from manta.service.step_traces import budget
from manta.service.step_traces.reading import planned_step
from manta.workers.accounting.flops import step_flops
from manta.workers.step_traces.assembly import StepTrace, TracedRank
from manta.workers.timing.recording import Slice, TracedStep

JOB = spec(train={"micro_batch_size": 2}, parallel={"pipeline": 2})
OF_EVERY_JOB = [name for name in budget.PARTS if name not in budget.ONLY_SOME_HAVE]


def seconds_of(parts):
    return {part.name: part.seconds for part in parts}


@given(SHAPES, SECONDS, SECONDS)
def test_parts_of_a_trace_are_its_steps_and_the_bubble_is_the_schedules(shape, forward, backward):
    kind, stages, virtual_stages, _ = shape
    timeline = timeline_of(*shape, PassTimes(forward, backward, backward))
    parts = budget.of_trace(trace_of(kind, stages, virtual_stages, timeline), JOB)
    assert [part.name for part in parts] == OF_EVERY_JOB
    known = seconds_of(parts)
    assert sum(known.values()) == pytest.approx(timeline.makespan, rel=1e-6)
    assert known["bubble"] == pytest.approx(timeline.makespan - timeline.work, abs=1e-5)
    assert known["arithmetic"] == pytest.approx(timeline.work, abs=1e-5), "all passes, where no peak is known"
    assert all(part.how for part in parts)


def lane(*slices):
    """What one rank without a pipeline does, from slices as (kind, start, end, more)."""
    made = tuple(Slice(kind, start, end, 1, **more) for kind, start, end, more in slices)
    return StepTrace(grid_of("1f1b", 1, 1), (TracedRank(0, (TracedStep(1, 0.0, 100.0),), made, peak_flops=1e6),))


def test_trace_slices_of_every_kind_belong_to_a_budget_part():
    tensor, data, world = ({"axis": axis, "number": 1} for axis in ("tensor", "data", "world"))
    trace = lane(
        ("loader", 0, 1, {}), ("forward", 1, 21, {}), ("collective", 2, 4, tensor), ("backward", 21, 61, {}),
        ("recompute", 22, 30, {}), ("collective", 23, 24, tensor), ("reduction", 61, 66, {}),
        ("collective", 62, 65, data), ("snapshot", 66, 68, {}), ("agreement", 68, 71, {}),
        ("collective", 69, 71, world), ("optimizer", 71, 80, {}), ("gather", 75, 79, {}),
        ("collective", 76, 79, data), ("validation", 80, 90, {}), ("validation", 81, 89, {}),
        ("collective", 82, 85, tensor), ("checkpoint", 90, 94, {}),
    )  # fmt: skip
    ideal = step_flops(JOB).model_causal / (1e6 * JOB.layout.world_size)
    passes = 60 - 2 - 8
    assert seconds_of(budget.of_trace(trace, JOB)) == pytest.approx(
        {
            "arithmetic": ideal, "products": passes - ideal, "recomputation": 7, "bubble": 0, "tensor": 3,
            "pipeline": 0, "data": 5 + 2 + 4, "optimizer": 1 + 5, "loader": 1, "snapshot": 2 + 4, "rest": 10 + 6,
        }
    )  # fmt: skip


def test_budget_of_an_empty_trace_has_no_parts():
    assert budget.of_trace(StepTrace(grid_of("1f1b", 1, 1), (TracedRank(0, (), ()),)), JOB) == ()


ROW = {
    "step_seconds": 10.0, "mfu_causal": 0.2, "mfu_full": 0.25, "data_seconds": 0.5, "forward_seconds": 2.0,
    "backward_seconds": 3.0, "recompute_seconds": 0.5, "tensor_communication_seconds": 1.0,
    "pipeline_communication_seconds": 0.25, "data_communication_seconds": 0.75, "bubble_seconds": 1.0,
    "optimizer_seconds": 0.5, "other_seconds": 0.5, "snapshot_seconds": 0.125,
}  # fmt: skip


def test_parts_of_phases_are_the_mean_step():
    slower = {name: 2 * value if name.endswith("seconds") else value for name, value in ROW.items()}
    parts = budget.of_phases([ROW, {"step_seconds": 7.0}, slower], JOB)
    assert seconds_of(parts) == pytest.approx(
        {
            "arithmetic": 0.2 * 15, "products": 7.5 - 0.2 * 15, "recomputation": 0.75, "bubble": 1.5, "tensor": 1.5,
            "pipeline": 0.375, "data": 1.125, "optimizer": 0.75, "loader": 0.75, "snapshot": 0.1875,
            "rest": 15 - 7.5 - 0.75 - 1.5 - 1.5 - 0.375 - 1.125 - 0.75 - 0.75 - 0.1875,
        }
    )  # fmt: skip
    assert "2 steps that were measured" in parts[0].how or "peak" in parts[0].how
    assert budget.of_phases([{"step_seconds": 7.0}], JOB) == ()
    validated = {**ROW, "step_seconds": 100.0, "validation_loss": 2.0}
    assert budget.of_phases([ROW, validated], JOB) == budget.of_phases([ROW], JOB) != budget.of_phases([validated], JOB)
    stalled = seconds_of(budget.of_phases([{**ROW, "snapshot_seconds": 1e3}], JOB))
    assert (stalled["snapshot"], stalled["rest"] >= 0) == (ROW["other_seconds"], True), "no more than no phase names"


@pytest.mark.parametrize("mfu", [0.25, None])
def test_budget_from_the_ledger_leaves_the_rest_unknown(mfu):
    parts = budget.of_ledger(10.0, {"data_wait": 1.0, "snapshot": 0.5}, mfu)
    known = seconds_of(parts)
    assert sum(known.values()) == pytest.approx(10.0)
    assert (known["loader"], known["snapshot"], known["arithmetic"]) == (1.0, 0.5, 2.5 if mfu else 0.0)
    assert known["rest"] == pytest.approx(6.0 if mfu else 8.5)
    assert "`manta trace`" in parts[-1].how


def test_parts_of_a_plan_are_the_planned_step():
    names = ["arithmetic", "products", "elementwise", "recomputation", "tensor", "host", "bubble"]
    names += ["gradients", "optimizer", "replicas", "context", "expert"]
    shares = [Share(name, 2.0**place, f"what {name} is", "") for place, name in enumerate(names)]
    parts = budget.of_plan(shares)
    assert [part.name for part in parts] == list(budget.PARTS)
    known = seconds_of(parts)
    assert sum(known.values()) == 2.0 ** len(names) - 1
    assert known["products"] == 2 + 4 + 32 and known["data"] == 128 + 512
    assert known["context"] == 1024 and known["rest"] == 0


def test_fractions_are_of_the_step():
    document = budget.to_json(budget.of_phases([ROW], JOB))
    assert sum(part["fraction"] for part in document) == pytest.approx(1.0)
    assert {part["name"]: part["fraction"] for part in document}["tensor"] == pytest.approx(0.1)


MODEL = {"layers": 8, "hidden_size": 1024, "heads": 8, "sequence_length": 512, "vocabulary_size": 32000}


def job(**parallel):
    train = {"global_batch_size": 32, "micro_batch_size": 2, "precision": "bf16"}
    return spec(model=MODEL, train=train, parallel=parallel)


def cluster(nodes=1):
    return Cluster(machine_of("a100-80gb"), nodes, 8)


def test_a_planned_step_has_a_lane_for_each_stage():
    planned = planned_step(job(tensor=2, pipeline=2, data=2), cluster())
    assert [(rank["rank"], rank["pipeline"]) for rank in planned.ranks] == [(0, 0), (2, 1)]
    for rank in planned.ranks:
        kinds = [each["kind"] for each in rank["slices"]]
        assert (kinds.count("forward"), kinds.count("backward"), kinds.count("optimizer")) == (8, 8, 1)
        ends = [each["end"] for each in rank["slices"]]
        assert ends == sorted(ends) and ends[-1] <= planned.seconds == rank["steps"][0]["end"]
    assert [part.name for part in planned.parts] == OF_EVERY_JOB
    (optimizer,) = [part.seconds for part in planned.parts if part.name == "optimizer"]
    update = planned.ranks[0]["slices"][-1]
    assert (update["kind"], update["end"] - update["start"]) == ("optimizer", pytest.approx(optimizer, abs=1e-6))
    assert sum(part.seconds for part in planned.parts) == pytest.approx(planned.seconds)
    assert planned.to_json()["bubble"]["mean"] == planned.bubble_ratio > 0


def test_planned_step_of_a_layout_that_does_not_fit_is_none():
    assert planned_step(job(tensor=8, pipeline=2), cluster()) is None, "there is no room for it"
    assert planned_step(job(tensor=8, pipeline=2), cluster(2)) is not None


def test_planned_step_with_too_many_passes_has_no_timeline(monkeypatch):
    monkeypatch.setattr("manta.service.step_traces.reading.MAX_PASSES", 10)
    planned = planned_step(job(pipeline=2), cluster())
    assert planned.ranks is None and planned.seconds > 0
