"""A trace from its request on: it is complete, or says why it is not."""

import pytest

from manta.service.states import JobState
from manta.service.store import events, generations, jobs, ranks, step_traces
from manta.service.store.errors import TraceNotFound, TraceNotPossible
from manta.workers.timing.recording import INTERRUPTED, PackedRecording


@pytest.fixture
def training(store, started):
    """A job of two ranks in its first generation."""
    number = store.write(lambda s: generations.begin(s, started.id, "submitted", False))
    about = {"tensor": 0, "pipeline": 0, "generation": number, "state": "running"}
    rows = [{"rank": rank, "data": rank, "node": f"node {rank}", **about} for rank in range(2)]
    store.write(lambda s: ranks.replace(s, started.id, rows))
    store.write(lambda s: setattr(jobs.get(s, started.id), "replicas", 2))
    return started.id


def request(store, job, steps=1, step=0, profiler_ranks=()):
    return store.write(lambda s: step_traces.request(s, job, steps, step, profiler_ranks)).number


def recorded(store, job, number, rank, problem="", count=3, generation=1):
    packed = PackedRecording("x", count, problem=problem)
    store.write(lambda s: step_traces.record_recorded(s, job, number, generation, 5, rank, packed))


def begun(store, job, number, generation=1):
    store.write(lambda s: step_traces.record_beginning(s, job, number, generation, 5))


def row(store, job, number):
    return store.query(step_traces.get, job, number)


def said(store, job):
    with store.read() as session:
        return [each.message for each in events.page(session, job).items if each.type.startswith("trace_")]


def test_a_trace_is_complete_once_all_ranks_have_recorded(store, training):
    number = request(store, training, 2, 4)
    asked = row(store, training, number)
    assert (asked.state, asked.steps, asked.wanted_step, asked.first_step) == ("requested", 2, 4, None)
    begun(store, training, number)
    recording = row(store, training, number)
    assert (recording.state, recording.generation, recording.first_step) == ("recording", 1, 5)
    assert (recording.parallel["world_size"], recording.nodes) == (2, ["node 0", "node 1"])
    recorded(store, training, number, 1)
    assert row(store, training, number).state == "recording"
    recorded(store, training, number, 0)
    over = row(store, training, number)
    assert (over.state, over.message, over.slices, over.finished_at > 0) == ("complete", None, 6, True)
    assert said(store, training) == ["trace_1 is complete"]
    assert sorted(store.query(step_traces.parts, training, number)) == [0, 1]


def test_rank_may_report_its_trace_before_the_beginning_is_reported(store, training):
    number = request(store, training)
    recorded(store, training, number, 1)
    begun(store, training, number)
    assert (row(store, training, number).state, row(store, training, number).first_step) == ("recording", 5)
    recorded(store, training, number, 0, generation=2)
    assert row(store, training, number).state == "recording", "another generation's is none of it"


def test_partial_trace_names_the_ranks_that_are_missing_and_why(store, training, monkeypatch):
    number = request(store, training)
    recorded(store, training, number, 0, "too much")
    recorded(store, training, number, 1)
    over = row(store, training, number)
    assert (over.state, over.message) == ("partial", "rank 0: too much")
    monkeypatch.setattr(step_traces, "MAX_SLICES", 5)
    number = request(store, training)
    recorded(store, training, number, 1)
    recorded(store, training, number, 0)
    over = row(store, training, number)
    assert (over.state, over.message) == ("partial", "rank 0: the trace has more than 5 slices without it")


def test_interrupted_trace_stays_open_until_the_cause_is_known(store, training):
    number = request(store, training)
    waiting = request(store, training)
    recorded(store, training, number, 0, INTERRUPTED)
    recorded(store, training, number, 1, INTERRUPTED, count=0)
    assert row(store, training, number).state == "recording"
    store.write(lambda s: step_traces.interrupt(s, training, "rank 1 was killed"))
    over = row(store, training, number)
    assert over.state == "partial"
    assert over.message == "the recording was interrupted: rank 1 was killed; there is no recording of rank 1"
    assert row(store, training, waiting).state == "requested", "the next generation may record it"


@pytest.mark.parametrize(
    ("states", "waiting", "why"),
    [
        (("RUNNING", "SUCCEEDED"), "failed", "the job is SUCCEEDED, at step 0"),
        (("RUNNING", "PAUSING", "PAUSED"), "requested", "the job is PAUSED, at step 0"),
        (("RUNNING", "CANCELLING", "CANCELLED"), "failed", "the job is CANCELLED, at step 0"),
        (("QUEUED",), "requested", "the job is QUEUED, at step 0"),
    ],
)
def test_the_end_of_a_job_ends_its_traces(store, training, states, waiting, why):
    number, later = request(store, training), request(store, training)
    begun(store, training, number)
    for state in states:
        store.write(lambda s, to=state: jobs.transition(s, training, JobState(to)))
    over = row(store, training, number)
    assert (over.state, over.message) == ("failed", f"the recording was interrupted: {why}")
    other = row(store, training, later)
    assert (other.state, other.message) == (waiting, f"it did not begin: {why}" if waiting == "failed" else None)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"step": 11}, "ends with step 10, and has committed 0"),
        ({"steps": 3000}, "3000 steps of 2 ranks are too many for one trace: trace 2048 at most"),
        ({"profiler_ranks": (1, 2)}, "no rank 2; its ranks are 0 to 1"),
    ],
)
def test_trace_request_with_impossible_steps_or_ranks_is_refused(store, training, wanted, why):
    with pytest.raises(TraceNotPossible, match=why):
        request(store, training, **wanted)


def test_last_step_of_a_job_can_be_recorded(store, training):
    number = request(store, training, step=10)
    assert (row(store, training, number).state, row(store, training, number).wanted_step) == ("requested", 10)


def test_trace_request_for_a_missing_rank_names_the_only_rank(store, submit):
    job = submit().id
    with pytest.raises(TraceNotPossible, match=f"{job} has no rank 2; its only rank is 0"):
        request(store, job, profiler_ranks=(2,))


def test_a_job_that_is_over_or_has_traces_enough_takes_no_more(store, training):
    for _ in range(step_traces.MAX_WAITING):
        request(store, training)
    with pytest.raises(TraceNotPossible, match=r"5 traces of .* are unfinished"):
        request(store, training)
    for state in ("RUNNING", "SUCCEEDED"):
        store.write(lambda s, to=state: jobs.transition(s, training, JobState(to)))
    with pytest.raises(TraceNotPossible, match="SUCCEEDED: only a job that still trains"):
        request(store, training)


def test_oldest_trace_is_removed_and_numbers_are_not_reused(store, training, monkeypatch):
    monkeypatch.setattr(step_traces, "MAX_TRACES", 3)
    for number in range(1, 6):
        assert request(store, training) == number
        recorded(store, training, number, 0)
        recorded(store, training, number, 1)
    with store.read() as session:
        assert [each.number for each in step_traces.of_job(session, training)] == [3, 4, 5]
        assert step_traces.parts(session, training, 2) == {}
    with pytest.raises(TraceNotFound):
        row(store, training, 2)


def test_unfinished_traces_count_towards_the_limit_and_are_not_removed(store, training, monkeypatch):
    monkeypatch.setattr(step_traces, "MAX_TRACES", 3)
    all_kept = ([1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 6, 7])
    for kept in all_kept:
        number = request(store, training)
        with store.read() as session:
            assert [each.number for each in step_traces.of_job(session, training)] == kept
        for rank in range(2) if number not in (4, 6) else ():
            recorded(store, training, number, rank)


def test_jobs_with_requested_traces_are_known_from_the_database(store, training):
    assert store.query(step_traces.jobs_with_waiting_traces) == set()
    number = request(store, training)
    assert store.query(step_traces.jobs_with_waiting_traces) == {training}
    store.write(lambda s: step_traces.fail(s, training, number, "no"))
    assert store.query(step_traces.jobs_with_waiting_traces) == set()
    assert said(store, training) == ["trace_1 is failed: no"]


@pytest.mark.parametrize("text", ["trace_0", "trace_", "trace_01", "trace_x", "1", ""])
def test_text_that_is_not_a_trace_id_has_no_number(text):
    assert step_traces.number_of(text) is None
    assert step_traces.number_of("trace_12") == 12
