"""What holds of all spans, whatever happened to the job."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import TRANSITIONS, JobState
from manta.service.store.tables import StateChange
from manta.service.traces.spans import JobHistory, span_id, spans_of, trace_id
from tests.service.traces.histories import JOB, begun, recovered

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
