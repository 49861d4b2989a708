"""What a pause and its end write; a failed job keeps its memory for a while, and can be tried again."""

import time
from types import SimpleNamespace

import pytest

from manta.service.states import JobState
from manta.service.store import events, generations, jobs, pauses_and_retries
from manta.service.store.errors import IllegalTransition


def move(store, job, *states):
    for state in states:
        store.write(lambda s, to=state: jobs.transition(s, job.id, JobState(to)))


def test_a_job_in_the_queue_is_paused_at_once_and_goes_back_there(store, submit):
    job = submit()
    paused = store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    assert (paused.state, paused.reason, paused.message) == ("PAUSED", "paused_by_user", "paused by the user")
    resumed = store.write(lambda s: pauses_and_retries.request_resume(s, job.id))
    assert (resumed.state, resumed.reason) == ("QUEUED", "resumed_by_user")


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "RECOVERING", "RESIZING"])
def test_pause_of_a_placed_job_makes_it_pausing_with_one_event(store, started, state):
    move(store, started, *{"STARTING": [], "RESIZING": ["RUNNING", "RESIZING"]}.get(state, [state]))
    saves = f"its state is being saved (manta cancel {started.id} does not wait for that)"
    for _ in range(2):
        pausing = store.write(lambda s: pauses_and_retries.request_pause(s, started.id))
        assert (pausing.state, pausing.message) == ("PAUSING", f"paused by the user; {saves}")
    with store.read() as session:
        said = [event.data["to"] for event in events.page(session, started.id).items if event.type == "state_changed"]
    assert said.count("PAUSING") == 1


def test_second_pause_of_a_paused_job_changes_nothing(store, submit):
    job = submit()
    first = store.write(lambda s: pauses_and_retries.request_pause(s, job.id)).updated_at
    second = store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    assert (second.state, second.updated_at) == ("PAUSED", first)


@pytest.mark.parametrize(
    ("states", "request_", "advice"),
    [
        (["CANCELLING"], pauses_and_retries.request_pause, "is CANCELLING: it is being cancelled"),
        (["FAILED"], pauses_and_retries.request_pause, "`manta retry` continues it"),
        (["PAUSING"], pauses_and_retries.request_resume, "wait until it is PAUSED, then resume it"),
        (["RUNNING"], pauses_and_retries.request_resume, "it is not paused, so it continues by itself"),
        (["CANCELLING"], pauses_and_retries.request_resume, "resume works only while it is PAUSED"),
    ],
)
def test_pause_or_resume_in_the_wrong_state_is_refused_with_advice(store, started, states, request_, advice):
    move(store, started, *states)
    with pytest.raises(IllegalTransition, match=advice):
        store.write(lambda s: request_(s, started.id))


def test_resume_notes_itself_and_forgets_that_the_generation_was_to_end_in_a_pause(store, started):
    def pause(session):
        generations.begin(session, started.id, "submitted", False)
        generations.end(session, started.id, 1, outcome={"state": "PAUSED", "reason": None, "message": None})
        pauses_and_retries.request_pause(session, started.id)
        jobs.transition(session, started.id, JobState.PAUSED)

    store.write(pause)
    store.write(lambda s: pauses_and_retries.request_resume(s, started.id))
    (life,) = store.query(generations.of_job, started.id)
    assert life.data == {pauses_and_retries.RESUMED: True}


@pytest.fixture
def failed(store, started):
    """A job that failed in its first generation, whose snapshots are kept until 1000."""

    def fail(session):
        generations.begin(session, started.id, "submitted", False)
        generations.end(session, started.id, 1, outcome={"state": "FAILED", "reason": "x", "message": "y"})
        jobs.transition(session, started.id, JobState.FAILED, "x", "a sentence")
        jobs.get(session, started.id).memory_kept_until = 1000.0

    store.write(fail)
    return started


def row(store, job):
    return store.query(jobs.get, job.id)


def test_retry_requeues_a_failed_job_and_forgets_how_it_ended(store, failed):
    store.write(lambda s: pauses_and_retries.request_retry(s, failed.id))
    now = row(store, failed)
    assert (now.state, now.reason, now.finished_at, now.memory_kept_until) == ("QUEUED", "retried_by_user", None, None)
    assert "a sentence" in now.message
    assert now.retried_at == now.updated_at
    (life,) = store.query(generations.of_job, failed.id)
    assert "outcome" not in life.data


@pytest.mark.parametrize("ahead", [3600.0, -3600.0], ids=["set_back", "set_forward"])
def test_retry_is_dated_between_two_generations_even_if_the_clock_is_wrong(store, failed, monkeypatch, ahead):
    """Or whatever the clock of the control plane says that is asked for it: else what was before would count on."""

    def shift(session):
        for life in generations.of_job(session, failed.id):
            life.started_at += ahead

    store.write(shift)
    store.write(lambda s: pauses_and_retries.request_retry(s, failed.id))
    real = time.time
    monkeypatch.setattr(generations, "time", SimpleNamespace(time=lambda: real() + ahead))
    store.write(lambda s: generations.begin(s, failed.id, "retried by the user", False))
    before, after = store.query(generations.of_job, failed.id)
    assert before.started_at <= row(store, failed).retried_at < after.started_at


def test_retry_of_a_job_that_has_not_failed_is_refused(store, submit):
    waiting = submit()
    with pytest.raises(IllegalTransition, match="retry works only while it is FAILED"):
        store.write(lambda s: pauses_and_retries.request_retry(s, waiting.id))


def test_snapshots_are_held_by_unfinished_jobs_and_failed_ones_that_may_be_retried(store, failed, submit):
    waiting, over = submit(), submit()
    store.write(lambda s: jobs.request_cancel(s, over.id))
    every = [failed.id, waiting.id, over.id]
    assert store.query(pauses_and_retries.holding_memory, every) == {failed.id, waiting.id}
    assert store.query(pauses_and_retries.holding_memory, [over.id, waiting.id]) == {waiting.id}


def test_snapshots_of_a_failed_job_are_released_once_after_their_time(store, failed):
    assert store.query(pauses_and_retries.memory_expired, 999.0) == []
    assert store.query(pauses_and_retries.memory_expired, 1001.0) == [failed.id]
    assert not store.write(lambda s: pauses_and_retries.release_snapshots(s, failed.id, 999.0))
    assert store.write(lambda s: pauses_and_retries.release_snapshots(s, failed.id, 1001.0))
    assert row(store, failed).memory_kept_until is None
    assert not store.write(lambda s: pauses_and_retries.release_snapshots(s, failed.id, 1001.0)), (
        "nothing is kept any more"
    )
    assert store.query(pauses_and_retries.holding_memory, [failed.id]) == set()


def test_snapshots_of_a_retried_job_are_kept_past_their_time(store, failed):
    store.write(lambda s: pauses_and_retries.request_retry(s, failed.id))
    assert not store.write(lambda s: pauses_and_retries.release_snapshots(s, failed.id, 1001.0))


def test_snapshots_of_an_unfinished_job_are_kept_past_their_time(store, started):
    store.write(lambda s: setattr(jobs.get(s, started.id), "memory_kept_until", 1000.0))
    assert not store.write(lambda s: pauses_and_retries.release_snapshots(s, started.id, 1001.0))
    assert row(store, started).memory_kept_until == 1000.0


def test_snapshots_of_a_failed_job_are_still_kept_at_the_very_end_of_their_time(store, failed):
    assert store.query(pauses_and_retries.memory_expired, 1000.0) == []
    assert not store.write(lambda s: pauses_and_retries.release_snapshots(s, failed.id, 1000.0))
