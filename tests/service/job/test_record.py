"""A running job in the database: what is written when a generation begins, and when the job ends."""

import asyncio
import time
from dataclasses import replace

import pytest

from manta.service.job.record import JobRecord
from manta.service.recovery.decisions import Death, Incident, PastFailure
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState
from manta.service.store import events, generations, jobs, pauses_and_retries, ranks, recoveries
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume


@pytest.fixture
def record(store, submit):
    return JobRecord(store, submit().id)


def begun(record, resume):
    asyncio.run(record.begin("test", False, resume, resume.source, ParallelConfig(), None, []))
    return record.store.query(lambda session: [event.type for event in events.page(session, record.id).items])


def reached(record, step):
    def note(session):
        jobs.get(session, record.id, lock=True).step = step

    record.store.write(note)


def test_state_lost_event_is_written_when_a_job_restarts_from_nothing(record):
    assert "state_lost" not in begun(record, Resume())
    reached(record, 7)
    assert begun(record, Resume()).count("state_lost") == 1
    (lost,) = events_of(record, "state_lost")
    assert (lost.generation, lost.step, lost.data) == (2, 0, {"steps": 7})


@pytest.mark.parametrize("kept", [True, False])
def test_snapshots_of_a_job_cancelled_while_it_fails_are_not_kept_longer(record, kept):
    def cancel(session):
        jobs.transition(session, record.id, JobState.STARTING)
        jobs.request_cancel(session, record.id)

    record.store.write(cancel)
    asyncio.run(record.end(JobState.FAILED, "user_error", "boom", time.time() + 1000 if kept else None))
    with record.store.read() as session:
        job, expired = jobs.get(session, record.id), pauses_and_retries.memory_expired(session, time.time() + 1)
    assert (job.state, job.reason, expired) == ("CANCELLED", None, [record.id] if kept else [])


def test_state_lost_event_is_absent_if_a_job_resumes_from_any_state(record):
    reached(record, 7)
    assert "state_lost" not in begun(record, Resume("snapshot", 7))
    assert "state_lost" not in begun(record, Resume("checkpoint", 5, "/somewhere"))


def row(rank, actor, generation=1, state="running", pid=100):
    """A rank of a job in its table."""
    where = {"tensor": rank, "pipeline": 0, "data": 0, "generation": generation, "state": state}
    return {"rank": rank, "actor": actor, "pid": pid + rank, **where}


def ranks_of(record):
    with record.store.read() as session:
        return [(each.actor, each.pid, each.state) for each in ranks.of_job(session, record.id)]


def events_of(record, kind):
    with record.store.read() as session:
        return [event for event in events.page(session, record.id).items if event.type == kind]


def walk(record, *states):
    for state in states:
        record.store.write(lambda s, state=state: jobs.transition(s, record.id, state))


KILLED = Incident(
    Death(1, "killed", message="was killed by SIGKILL"),
    PastFailure("killed", 99.0, rank=1, node="n1", committed=7),
    RecoveryTimeline(noticed_at=101.0, failed_at=99.0),
    wait_seconds=0.5,
)


def test_generation_after_a_failure_records_its_resume_point_and_cause(record):
    """The next failure is judged by it, and another control plane takes over by it."""
    reached(record, 7)
    layout = ParallelConfig(tensor=2)
    resume = Resume("checkpoint", 5, "/c/5")
    number = asyncio.run(record.begin("died", True, resume, "checkpoint", layout, KILLED, [row(0, "a"), row(1, "b")]))
    with record.store.read() as session:
        (life,) = generations.of_job(session, record.id)
        (recovery,) = recoveries.of_job(session, record.id)
        job = jobs.get(session, record.id)
    assert (life.generation, life.cause, life.resume_source, life.resume_step) == (number, "died", "checkpoint", 5)
    assert life.data == {"failure": KILLED.failure.to_json(), "resume_path": "/c/5"}
    assert (job.restarts, job.tensor, job.pipeline, job.replicas) == (1, 2, 1, 1)
    assert (recovery.generation, recovery.kind, recovery.rank, recovery.node) == (number, "killed", 1, "n1")
    assert (recovery.source, recovery.resume_step, recovery.wait_seconds) == ("checkpoint", 5, 0.5)
    (began,) = events_of(record, "generation_started")
    assert (began.generation, began.step) == (number, 5)
    assert began.message == "generation 1 continues after step 5 from /c/5: died"
    assert began.data == {"resume_source": "checkpoint", "resume_step": 5}


def test_generation_without_a_restart_has_no_recovery(record):
    begun(record, Resume())
    with record.store.read() as session:
        assert jobs.get(session, record.id).restarts == 0
        assert recoveries.of_job(session, record.id) == []
    (began,) = events_of(record, "generation_started")
    assert began.message == "generation 1 starts at step 1: test", "which is no resuming"


@pytest.mark.parametrize(("actors", "kept"), [(("a", "b"), True), (("a", "c"), False)])
def test_rows_of_ranks_are_reset_only_if_their_agents_change(record, actors, kept):
    """Rows of agents that stay say who runs, until the launch is through."""
    before = [row(0, "a"), row(1, "b")]
    record.store.write(lambda s: ranks.replace(s, record.id, before))
    expected = [row(rank, actor, 2, "starting", pid=200) for rank, actor in enumerate(actors)]
    asyncio.run(record.begin("test", False, Resume(), "start", ParallelConfig(tensor=2), None, expected))
    now = before if kept else expected
    assert ranks_of(record) == [(each["actor"], each["pid"], each["state"]) for each in now]


def test_launch_event_says_which_processes_were_kept_or_started(record):
    expected = [row(0, "a"), row(1, "b"), row(2, "c")]
    incident = replace(KILLED, timeline=RecoveryTimeline(101.0))
    layout = ParallelConfig(tensor=3)
    number = asyncio.run(record.begin("died", True, Resume("snapshot", 5), "snapshot", layout, incident, expected))
    asyncio.run(record.launched(number, 105.0, [row(n, a, number, pid=300) for n, a in enumerate("abc")], [0, 2]))
    (recovery,) = record.store.query(recoveries.of_job, record.id)
    assert (recovery.launched_at, recovery.forked, recovery.kept) == (105.0, [1], 2)
    assert [pid for _, pid, _ in ranks_of(record)] == [300, 301, 302]
    (entry,) = events_of(record, "ranks_replaced")
    assert (entry.generation, entry.data) == (number, {"kept": [0, 2], "started": [1]})
    assert entry.message == "generation 1 keeps the processes of 2 of 3 ranks"


def test_launch_that_kept_no_process_adds_no_replacement_event(record):
    begun(record, Resume())
    asyncio.run(record.launched(1, 105.0, [row(0, "a")], []))
    assert events_of(record, "ranks_replaced") == []


@pytest.mark.parametrize(("asked", "becomes", "reason"), [
    (None, "QUEUED", "insufficient_slots"),
    (JobState.CANCELLING, "CANCELLING", None),
    (JobState.PAUSING, "PAUSED", None),
])  # fmt: skip
def test_job_without_places_is_queued_unless_cancelled_or_paused(record, asked, becomes, reason):
    walk(record, JobState.STARTING, *([asked] if asked else []))
    record.store.write(lambda s: ranks.replace(s, record.id, [row(0, "a")]))
    cancelled = asked is JobState.CANCELLING
    assert asyncio.run(record.back_to_queue("no place")) is not cancelled
    job = record.store.query(jobs.get, record.id)
    assert (job.state, job.reason, job.message) == (becomes, reason, None if cancelled else "no place")
    assert ranks_of(record) == [("a", None, "exited")]


def test_job_without_gpu_places_waits_for_gpus(record):
    record.store.write(lambda s: jobs.decide_accelerator(s, record.id, "gpu"))
    walk(record, JobState.STARTING)
    asyncio.run(record.back_to_queue("no place"))
    with record.store.read() as session:
        assert jobs.get(session, record.id).reason == "insufficient_gpus"


@pytest.mark.parametrize("cancelled", [False, True])
def test_job_is_paused_unless_cancelled_meanwhile(record, cancelled):
    walk(record, JobState.STARTING, JobState.RUNNING, JobState.PAUSING, *([JobState.CANCELLING] if cancelled else []))
    record.store.write(lambda s: ranks.replace(s, record.id, [row(0, "a")]))
    reached(record, 7)
    assert asyncio.run(record.pause()) is not cancelled
    job = record.store.query(jobs.get, record.id)
    assert job.state == ("CANCELLING" if cancelled else "PAUSED")
    assert ranks_of(record) == [("a", None, "exited")]
    if not cancelled:
        assert job.reason == "paused_by_user"
        assert job.message == f"paused by the user at step 7; manta resume {record.id} continues it"


@pytest.mark.parametrize("until", [None, 86400.0])
def test_failed_job_says_why_and_how_long_its_snapshots_are_kept(record, until):
    walk(record, JobState.STARTING)
    record.store.write(lambda s: ranks.replace(s, record.id, [row(0, "a")]))
    asyncio.run(record.end(JobState.FAILED, "user_error", "boom", until))
    job = record.store.query(jobs.get, record.id)
    assert (job.state, job.reason, job.message, job.memory_kept_until) == ("FAILED", "user_error", "boom", until)
    assert ranks_of(record) == [("a", None, "exited")]
    said = [(event.data, "1970-01-02 00:00 UTC" in event.message) for event in events_of(record, "memory_kept")]
    assert said == ([] if until is None else [({"until": until}, True)])


def test_outcome_of_a_generation_is_stored_for_the_next_control_plane(record):
    assert asyncio.run(record.outcome()) is None
    begun(record, Resume())
    assert asyncio.run(record.outcome()) is None
    asyncio.run(record.record_outcome(JobState.FAILED, "user_error", "boom"))
    assert asyncio.run(record.outcome()) == {"state": "FAILED", "reason": "user_error", "message": "boom"}
    begun(record, Resume())
    assert asyncio.run(record.outcome()) is None, "that was of the generation before"


def test_held_event_is_repeated_only_for_a_new_reason_or_after_progress(record):
    reached(record, 7)
    for why in ("no disk", "no disk", "no network"):
        asyncio.run(record.record_hold(why))
    assert sorted((event.message, event.step) for event in events_of(record, "held")) == [
        ("no disk", 7),
        ("no network", 7),
    ]
    record.store.write(lambda s: events.append(s, record.id, "first_step", "it went on", generation=1, step=8))
    asyncio.run(record.record_hold("no disk"))
    assert [event.message for event in events_of(record, "held")].count("no disk") == 2


def test_held_job_shows_its_reason_unless_its_state_has_another(record):
    walk(record, JobState.STARTING)
    asyncio.run(record.record_hold("no disk"))
    said = asyncio.run(record.job())
    assert (said.reason, said.message) == ("held", "no disk")
    record.store.write(lambda s: jobs.transition(s, record.id, JobState.PAUSING, "paused_by_user", "by the user"))
    asyncio.run(record.record_hold("no network"))
    begun(record, Resume())
    said = asyncio.run(record.job())
    assert (said.reason, said.message) == ("paused_by_user", "by the user")


@pytest.mark.parametrize(("state", "then"), [("CANCELLING", "CANCELLING"), ("RUNNING", "RECOVERING")])
def test_only_a_legal_state_transition_is_recorded(record, state, then):
    walk(record, JobState.STARTING, JobState(state))
    asyncio.run(record.record_state(JobState.RECOVERING))
    assert asyncio.run(record.job()).state == then


def test_event_stores_message_rank_step_and_data(record):
    asyncio.run(record.event("note", "hello", rank=3, step=0, data={"x": 1}))
    (entry,) = events_of(record, "note")
    assert (entry.message, entry.rank, entry.step, entry.data) == ("hello", 3, 0, {"x": 1})


def test_current_generation_of_a_job_is_the_newest(record):
    assert asyncio.run(record.current_generation()) is None
    for step in (3, 5):
        begun(record, Resume("snapshot", step))
    current = asyncio.run(record.current_generation())
    assert (current.generation, current.resume_step) == (2, 5)
    assert [row.generation for row in asyncio.run(record.generations())] == [1, 2]


def test_steps_that_were_rolled_back_are_listed_in_order(record):
    for step in (5, 9):
        asyncio.run(record.event("rolled_back", "why", rank=1, step=step, data={"step": step}))
    assert asyncio.run(record.data_of("rolled_back")) == [{"step": 5}, {"step": 9}]
    assert [(e.rank, e.step) for e in events_of(record, "rolled_back")] == [(1, 5), (1, 9)]
