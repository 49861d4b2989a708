"""Spans of starts and recoveries, whatever happened to the job."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.timeline import PHASES, RecoveryTimeline
from manta.service.states import TRANSITIONS, JobState
from manta.service.store.tables import StateChange
from manta.service.traces.spans import START_PHASES, JobHistory, span_id, spans_of, trace_id
from tests.service.traces.histories import JOB, LAYOUT, begun, broken_off, history, recovered

moments = st.floats(0, 1000)
maybe = st.none() | moments


@st.composite
def histories(draw):
    """Of one job: legal states in order of time, generations in order of time, some of which a failure made necessary,
    with whatever times its ranks noted."""
    state, states = JobState.QUEUED, []
    for at in sorted(draw(st.lists(moments, min_size=1, max_size=12))):
        states.append(StateChange(time=at, state=state))
        following = sorted(TRANSITIONS[state])
        if not following:
            break
        state = draw(st.sampled_from(following))
    starts = sorted(draw(st.lists(moments, max_size=6)))
    generations = [begun(number, at, draw(maybe), draw(maybe), draw(maybe)) for number, at in enumerate(starts, 1)]
    recoveries = [
        recovered(each.generation, RecoveryTimeline(draw(moments), *times))
        for each in generations[1:]
        if draw(st.booleans())
        for times in [(*(draw(maybe) for _ in range(5)), each.first_step_at)]
    ]
    return JobHistory(JOB, states, generations, recoveries)


@given(histories())
def test_child_spans_lie_within_their_parent_and_ids_are_unique(job):
    spans = [span for number in range(len(job.generations) + 1) for span in spans_of(job, number)]
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        whole = span if span.parent_id is None else by_id[span.parent_id]
        assert whole.began_at <= span.began_at <= span.ended_at <= whole.ended_at
        assert span.trace_id == trace_id(job.job.id)
        assert span.name.startswith(whole.name)


@given(histories(), st.integers(1, 6))
def test_child_spans_follow_one_another(job, number):
    spans = spans_of(job, number)
    for whole in spans:
        parts = [span for span in spans if span.parent_id == whole.span_id]
        assert all(before.ended_at == after.began_at for before, after in itertools.pairwise(parts))


@given(histories(), st.integers(1, 6))
def test_spans_of_a_generation_do_not_depend_on_later_history(job, number):
    until = next((each.started_at for each in job.generations if each.generation > number), 1000.0)
    so_far = JobHistory(
        job.job,
        [entry for entry in job.states if entry.time <= until],
        [each for each in job.generations if each.generation <= number],
        [each for each in job.recoveries if each.generation <= number],
    )
    assert spans_of(so_far, number) == spans_of(job, number)


def test_span_ids_follow_from_job_generation_and_name():
    """All releases have to agree on them: the first bytes of SHA-256."""
    assert trace_id("job_1") == 0xBB2632AF3674B8F0EBE2E6951CF8AAFF
    assert span_id("job_1", 2, "job.recovery") == 0x9CAE5C4B7CBD6819
    others = [span_id("job_1", 2, "a"), span_id("job_1", 3, "a"), span_id("job_2", 2, "a"), span_id("job_1", 2, "b")]
    assert len(set(others)) == 4


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
            "0 QUEUED, 5 STARTING, 9 QUEUED, 12 STARTING, 20 RUNNING", [(14, 18, 20, None)],
            {"": (0, 20), "queued": (0, 12), "placing": (12, 14), "launching": (14, 18), "first_step": (18, 20)},
            id="what could not be placed has waited all the time",
        ),
        pytest.param(
            "0 QUEUED, 3 PAUSED, 50 QUEUED, 55 STARTING, 70 RUNNING", [(58, 68, 70, None)],
            {"": (50, 70), "queued": (50, 55), "placing": (55, 58), "launching": (58, 68), "first_step": (68, 70)},
            id="a pause is no waiting",
        ),
        pytest.param(
            ONCE, [(8, None, None, 12), (12, 18, 20, None)],
            {"": (0, 20), "queued": (0, 5), "placing": (5, 8), "launching": (8, 18), "first_step": (18, 20)},
            id="a launch that had to be done again is a part of the start",
        ),
        pytest.param(
            "0 QUEUED, 5 STARTING, 10 QUEUED, 12 STARTING, 20 RUNNING", [(8, None, None, 14), (14, 18, 20, None)],
            {"": (0, 20), "queued": (0, 12), "placing": (12, 14), "launching": (14, 18), "first_step": (18, 20)},
            id="what was launched before its places were lost is a part of the waiting",
        ),
        pytest.param(
            ONCE, [(8, None, 20, None)], {"": (0, 20), "queued": (0, 5), "placing": (5, 8), "first_step": (8, 20)},
            id="a phase whose end is not known counts with the next",
        ),
        pytest.param(
            ONCE, [(8, 18, 7, None)], {"": (0, 7), "queued": (0, 5), "placing": (5, 7)},
            id="a rank whose clock is wrong makes no phase negative",
        ),
    ],
)  # fmt: skip
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
        "manta.layout.context": 1,
        "manta.layout.expert": 1,
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


STATES = "0 QUEUED, 5 STARTING, 20 RUNNING, 31 RECOVERING, 45 RUNNING"
FIRST = (8.0, 18.0, 20.0, 33.0)
OVER = RecoveryTimeline(31, 30, 32, 34, 36, 40, 45)


def test_recovery_span_has_a_child_span_per_phase():
    recovery, *parts = spans_of(history(STATES, [FIRST, (33, 40, 45, None)], {2: OVER}), 2)
    assert (recovery.name, recovery.began_at, recovery.ended_at) == ("job.recovery", 30, 45)
    assert [part.name for part in parts] == [f"job.recovery.{phase}" for phase in PHASES]
    assert [(part.began_at, part.ended_at) for part in parts] == [(30, 31), (31, 32), (32, 36), (36, 40), (40, 45)]
    assert all(part.parent_id == recovery.span_id for part in parts)


def test_recovery_span_has_cause_replaced_ranks_and_cost():
    (recovery, *_) = spans_of(history(STATES, [FIRST, (33, 40, 45, None)], {2: OVER}), 2)
    assert recovery.problem is None
    assert recovery.attributes == {
        "manta.job.id": "job_1", "manta.job.name": "small", "manta.job.project": "default", "manta.generation": 2,
        "manta.recovery.kind": "killed", "manta.recovery.cause": "rank 1 was killed", "manta.recovery.rank": 1,
        "manta.recovery.node": "node-a", "manta.recovery.ranks_replaced": (1,), "manta.recovery.ranks_kept": 3,
        "manta.recovery.wait_seconds": 0.0, "manta.recovery.steps_redone": 1, "manta.resume_source": "snapshot",
        "manta.resume_step": 4,
    }  # fmt: skip


def test_trace_of_an_interrupted_recovery_is_sent_with_the_next_one():
    first = broken_off(noticed_at=31.0, failed_at=30.0, rested_at=32.0)
    second = RecoveryTimeline(41, 40, 42, 44, 46, 50, 55)
    generations = [FIRST, (33.0, None, None, 43.0), (44.0, 50.0, 55.0, None)]
    job = history("0 QUEUED, 5 STARTING, 20 RUNNING, 31 RECOVERING", generations, {2: first, 3: second})
    assert spans_of(job, 2) == []
    wholes = [span for span in spans_of(job, 3) if span.parent_id is None]
    assert [(span.attributes["manta.generation"], span.began_at, span.ended_at) for span in wholes] == [
        (2, 30, 43), (3, 40, 55)
    ]  # fmt: skip
    assert [span.problem for span in wholes] == ["no step was committed before generation 3 began: cause 3", None]
    phases = [span.name for span in spans_of(job, 3) if span.parent_id == wholes[0].span_id]
    assert phases == ["job.recovery.detect", "job.recovery.rest"]


def test_recovery_span_is_sent_once():
    again = RecoveryTimeline(61, 60, 62, 64, 66, 70, 75)
    job = history(STATES, [FIRST, (33.0, 40.0, 45.0, 63.0), (63.0, 70.0, 75.0, None)], {2: OVER, 3: again})
    assert {span.attributes["manta.generation"] for span in spans_of(job, 2)} == {2}
    assert {span.attributes["manta.generation"] for span in spans_of(job, 3)} == {3}
