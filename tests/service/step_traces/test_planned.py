"""The planner's step in the shape of a trace: the passes of its pipeline, and what comes after them."""

import pytest
from engine_specs import spec

from manta.service.planner.hardware import Cluster, machine_of
from manta.service.step_traces.budget import PARTS
from manta.service.step_traces.reading import planned_step

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
    assert [part.name for part in planned.parts] == list(PARTS)
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
