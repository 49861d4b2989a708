"""What a user's pause and its end write."""

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
    saves = f"its state is being saved, for which `manta cancel {started.id}` does not wait"
    for _ in range(2):
        pausing = store.write(lambda s: pauses_and_retries.request_pause(s, started.id))
        assert (pausing.state, pausing.message) == ("PAUSING", f"paused by the user: {saves}")
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
    with store.read() as session:
        (life,) = generations.of_job(session, started.id)
        assert life.data == {pauses_and_retries.RESUMED: True}
