"""The ledger of a job as its rows tell it, and its recoveries."""

import time
from functools import partial
from types import SimpleNamespace

import pytest

from manta.service.ledger import GRACE_STEPS
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState
from manta.service.store import events, generations, jobs, ledgers, metrics, recoveries
from manta.service.store.errors import JobNotFound


def begin(store, job, *arguments):
    return store.write(lambda session: generations.begin(session, job.id, "test", *arguments))


def move(store, job, *states):
    for state in states:
        store.write(lambda session, to=state: jobs.transition(session, job.id, to))


def book(store, job, now=None):
    return store.query(ledgers.of_job, job.id, now or time.time())


def test_job_state_changes_are_recorded_with_their_times(store, started):
    move(store, started, JobState.RUNNING, JobState.SUCCEEDED)
    changes = store.query(jobs.states_over_time, started.id)
    job = store.query(jobs.get, started.id)
    listed = store.query(events.page, started.id).items
    assert [change.state for change in changes] == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    assert (changes[0].time, changes[1].time, changes[-1].time) == (job.created_at, job.started_at, job.finished_at)
    assert [event.time for event in listed if event.type == "state_changed"] == [change.time for change in changes[1:]]


def test_ledger_closes_when_the_job_ends_and_adds_up_to_its_wall_time(store, started):
    assert not book(store, started).closed
    begin(store, started, False)
    time.sleep(0.002)  # the step has room between the beginning and its end
    at = time.time()
    row = {"step": 1, "time": at, "generation": 1, "seconds": {"wall": 0.001, "data_wait": 0.0004}}
    store.write(lambda session: metrics.record(session, started.id, 1, 0, 1, [row]))
    move(store, started, JobState.RUNNING, JobState.SUCCEEDED)
    account = book(store, started, at + 1000)
    job = store.query(jobs.get, started.id)
    assert account.closed
    assert (account.began_at, account.until) == (job.created_at, job.finished_at)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_seconds)
    assert account.seconds["data_wait"] == pytest.approx(0.0004, rel=0.05)
    assert 0 < account.goodput < 1


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still unless a test sets it."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "time", lambda: made.now)
    return made


def test_patience_with_a_running_step_follows_all_earlier_steps_also_repeated_ones(clock, store, started):
    """What is done again takes its time too: else a job that was rolled back would be waited for too long before its
    silence counts as a failure."""
    begin(store, started, False)
    move(store, started, JobState.RUNNING)
    began, clock.now = clock.now, clock.now + 1000.0
    for number, step in enumerate([1, 2, 3, 2, 3], 1):  # rolled back once, ten seconds a step
        row = {"step": step, "time": began + 10.0 * number, "seconds": {"wall": 10.0}}
        store.write(lambda session, n=number, row=row: metrics.record(session, started.id, 1, 0, n, [row]))
    patience = 10.0 * GRACE_STEPS
    seconds = book(store, started, began + 50.0 + patience + 7.0).seconds
    assert {name: each for name, each in seconds.items() if each} == {
        "compute": 30.0 + patience, "redo": 20.0, "detect": 7.0
    }  # fmt: skip


def test_ledger_of_a_recovered_job_books_each_phase_and_the_time_after_its_last_step(clock, store, started):
    """The seconds before the failure was noticed, before all were connected and before they had their state, by the
    recovery's own times; those after the last step by the outcome."""

    def commit(generation, step, at):
        row = {"step": step, "time": at, "seconds": {"wall": 10.0}}
        store.write(lambda session: metrics.record(session, started.id, generation, 0, 1, [row]))

    def recover(session):
        number = generations.begin(session, started.id, "rank 3 was killed", True, "snapshot", 1)
        timeline = RecoveryTimeline(noticed_at=1014.0, failed_at=1012.0, rested_at=1015.0)
        recoveries.begin(session, started.id, number, timeline, kind="killed", rank=3, cause="rank 3 was killed")
        recoveries.record_latest(session, started.id, number, connected_at=1017.0, restored_at=1020.0)

    def end(session):
        generations.end(session, started.id, 2, outcome={"state": "SUCCEEDED"})
        jobs.transition(session, started.id, JobState.SUCCEEDED)

    begin(store, started, False)
    move(store, started, JobState.RUNNING)
    clock.now = 1014.0
    commit(1, 1, 1010.0)
    move(store, started, JobState.RECOVERING)
    clock.now = 1015.0
    store.write(recover)
    clock.now = 1030.0
    commit(2, 2, 1030.0)
    move(store, started, JobState.RUNNING)
    clock.now = 1036.0
    store.write(end)
    assert {name: each for name, each in book(store, started).seconds.items() if each} == {
        "compute": 20.0, "redo": 2.0, "detect": 2.0, "re_form": 3.0, "restore": 3.0, "start": 6.0
    }  # fmt: skip


def test_ledger_of_an_unknown_job_is_not_found(store):
    with pytest.raises(JobNotFound), store.read() as session:
        ledgers.of_job(session, "job_000000000000", 0.0)


@pytest.fixture
def recovering(store, started):
    """A job whose second generation is begun to recover from a killed rank."""
    begin(store, started, False)
    move(store, started, JobState.RUNNING, JobState.RECOVERING)

    def recover(session):
        number = generations.begin(session, started.id, "rank 3 was killed", True, "snapshot", 7)
        timeline = RecoveryTimeline(noticed_at=101.0, failed_at=100.0, rested_at=102.0)
        known = {"kind": "killed", "rank": 3, "cause": "rank 3 was killed", "node": "n1"}
        recoveries.begin(session, started.id, number, timeline, **known, source="snapshot", resume_step=7)
        recoveries.record_replaced(session, started.id, number, (3,), 7)

    store.write(recover)
    return started


def row_of(store, job):
    (row,) = store.query(recoveries.of_job, job.id)
    return row


def test_recovery_is_stored_with_the_ranks_that_were_replaced(store, recovering):
    row = row_of(store, recovering)
    assert (row.generation, row.kind, row.rank, row.node, row.forked, row.kept) == (2, "killed", 3, "n1", [3], 7)
    store.write(lambda session: recoveries.record_replaced(session, recovering.id, 2, [3, 5], 6))
    row = row_of(store, recovering)
    assert (row.forked, row.kept) == ([3, 5], 6)


def test_recovery_phase_ends_when_the_last_rank_ends_it(store, recovering):
    for connected, restored in ((103.0, 105.0), (104.0, 104.5), (None, 104.7)):
        store.write(
            lambda session, c=connected, r=restored: recoveries.record_latest(
                session, recovering.id, 2, connected_at=c, restored_at=r
            )
        )
    ended = store.write(lambda session: recoveries.end(session, recovering.id, 2, 106.0, 1))
    assert recoveries.timeline(ended).phases() == {"detect": 1, "rest": 1, "re_form": 2, "restore": 1, "redo": 1}


def test_ended_recovery_is_not_changed_by_later_reports(store, recovering):
    assert store.write(lambda session: recoveries.end(session, recovering.id, 2, 106.0, 1)) is not None
    assert store.write(lambda session: recoveries.end(session, recovering.id, 2, 109.0, 5)) is None
    store.write(lambda session: recoveries.record_latest(session, recovering.id, 2, restored_at=120.0))
    row = row_of(store, recovering)
    assert (row.first_step_at, row.steps_redone, row.restored_at) == (106.0, 1, None)


def test_generation_without_a_failure_has_no_recovery(store, started):
    begin(store, started, False)
    store.write(lambda session: recoveries.record_latest(session, started.id, 1, restored_at=1.0))
    assert store.write(lambda session: recoveries.end(session, started.id, 1, 2.0, 0)) is None
    assert store.query(recoveries.page, started.id).items == []


def test_recoveries_of_a_job_are_paged_in_the_order_of_generations(store, recovering):
    for _ in range(3):
        number = begin(store, recovering, True)
        known = partial(recoveries.begin, timeline=RecoveryTimeline(1.0), kind="killed", rank=0, cause="again")
        store.write(partial(known, job_id=recovering.id, generation=number))
    first = store.query(recoveries.page, recovering.id, limit=3)
    rest = store.query(recoveries.page, recovering.id, limit=3, cursor=first.next_cursor)
    assert [row.generation for row in (*first.items, *rest.items)] == [2, 3, 4, 5]
    assert (first.next_cursor is None, rest.next_cursor) == (False, None)


def test_state_changes_of_one_job_are_not_listed_for_another(store, started, submit):
    other = submit()
    with store.read() as session:
        assert [change.state for change in jobs.states_over_time(session, other.id)] == ["QUEUED"]
