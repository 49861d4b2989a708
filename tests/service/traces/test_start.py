"""A start is traced from the queue to the first step after it, whatever came in between."""

import pytest

from manta.service.traces.spans import START_PHASES, spans_of
from tests.service.traces.histories import LAYOUT, broken_off, history

ONCE = "0 QUEUED, 5 STARTING, 20 RUNNING"


def phases(spans):
    """Begin and end of the start and of its phases."""
    return {span.name.removeprefix("job.start").lstrip("."): (span.began_at, span.ended_at) for span in spans}


def test_submitted_placed_launched_and_stepped():
    spans = spans_of(history(ONCE, [(8, 18, 20, None)]), 1)
    assert phases(spans) == {
        "": (0, 20), "queued": (0, 5), "placing": (5, 8), "launching": (8, 18), "first_step": (18, 20)
    }  # fmt: skip
    assert [span.name for span in spans[1:]] == [f"job.start.{phase}" for phase in START_PHASES]


@pytest.mark.parametrize(
    ("states", "generations", "expected"),
    [
        pytest.param(
            "0 QUEUED, 5 STARTING, 9 QUEUED, 12 STARTING, 20 RUNNING",
            [(14, 18, 20, None)],
            {"": (0, 20), "queued": (0, 12), "placing": (12, 14), "launching": (14, 18), "first_step": (18, 20)},
            id="what could not be placed has waited all the time",
        ),
        pytest.param(
            "0 QUEUED, 3 PAUSED, 50 QUEUED, 55 STARTING, 70 RUNNING",
            [(58, 68, 70, None)],
            {"": (50, 70), "queued": (50, 55), "placing": (55, 58), "launching": (58, 68), "first_step": (68, 70)},
            id="a pause is no waiting",
        ),
        pytest.param(
            ONCE,
            [(8, None, None, 12), (12, 18, 20, None)],
            {"": (0, 20), "queued": (0, 5), "placing": (5, 8), "launching": (8, 18), "first_step": (18, 20)},
            id="a launch that had to be done again is a part of the start",
        ),
        pytest.param(
            "0 QUEUED, 5 STARTING, 10 QUEUED, 12 STARTING, 20 RUNNING",
            [(8, None, None, 14), (14, 18, 20, None)],
            {"": (0, 20), "queued": (0, 12), "placing": (12, 14), "launching": (14, 18), "first_step": (18, 20)},
            id="what was launched before its places were lost is a part of the waiting",
        ),
        pytest.param(
            ONCE,
            [(8, None, 20, None)],
            {"": (0, 20), "queued": (0, 5), "placing": (5, 8), "first_step": (8, 20)},
            id="a phase whose end is not known counts with the next",
        ),
        pytest.param(
            ONCE,
            [(8, 18, 7, None)],
            {"": (0, 7), "queued": (0, 5), "placing": (5, 7)},
            id="a rank whose clock is wrong makes no phase negative",
        ),
    ],
)
def test_start_span_has_the_phases_queued_placing_launch_and_first_step(states, generations, expected):
    assert phases(spans_of(history(states, generations), len(generations))) == expected


def test_start_span_is_written_for_each_placement():
    states = f"{ONCE}, 30 PAUSING, 32 PAUSED, 40 QUEUED, 41 STARTING, 50 RUNNING"
    job = history(states, [(8, 18, 20, 32), (42, 48, 50, None)])
    assert phases(spans_of(job, 1))[""] == (0, 20)
    assert phases(spans_of(job, 2))[""] == (40, 50)


def test_start_span_is_absent_for_a_generation_that_did_not_leave_the_queue():
    states = f"{ONCE}, 30 RESIZING, 35 RUNNING"
    assert spans_of(history(states, [(8, 18, 20, 31), (31, 34, 35, None)]), 2) == []


def test_start_span_is_not_sent_before_the_first_step():
    job = history("0 QUEUED, 5 STARTING", [(8, None, None, None)])
    assert spans_of(job, 1) == spans_of(job, 2) == []


def test_start_span_has_job_and_layout_attributes():
    start, *parts = spans_of(history(ONCE, [(8, 18, 20, None)], layout=LAYOUT), 1)
    which = {
        "manta.job.id": "job_1", "manta.job.name": "small", "manta.job.project": "default", "manta.generation": 1,
    }  # fmt: skip
    what = {
        "manta.cause": "cause 1", "manta.resume_source": "start", "manta.resume_step": 0, "manta.ranks": 6,
        "manta.layout.tensor": 2, "manta.layout.pipeline": 1, "manta.layout.data": 3,
    }  # fmt: skip
    assert start.attributes == which | what
    assert all(part.attributes == which for part in parts)


def test_start_span_of_an_older_generation_has_no_layout():
    job = history(f"{ONCE}, 30 RESIZING", [(8, 18, 20, 31), (31, None, None, None)], layout=LAYOUT)
    assert "manta.ranks" not in spans_of(job, 1)[0].attributes


def test_start_span_interrupted_by_a_death_lasts_until_the_first_step():
    states = "0 QUEUED, 5 STARTING, 11 RECOVERING, 20 RUNNING"
    timeline = broken_off(noticed_at=11.0, failed_at=10.0, first_step_at=20.0)
    spans = spans_of(history(states, [(8, None, None, 12), (12, 18, 20, None)], {2: timeline}), 2)
    wholes = {span.name: (span.began_at, span.ended_at) for span in spans if span.parent_id is None}
    assert wholes == {"job.start": (0, 20), "job.recovery": (10, 20)}
