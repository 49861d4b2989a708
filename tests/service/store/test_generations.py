"""Generations, and the recoveries that begin some of them."""

import pytest

from manta.service.states import JobState
from manta.service.store import checkpoints, generations, jobs, metrics, ranks
from manta.service.store.errors import JobNotFound
from manta.service.store.generations import TrainedStep


def begin(store, job, restart=False):
    return store.write(lambda session: generations.begin(session, job.id, "test", restart, "start", 0))


def test_generations_count_up_and_only_recoveries_count_as_restarts(store, started):
    assert [begin(store, started), begin(store, started, restart=True)] == [1, 2]
    job = store.query(jobs.get, started.id)
    first, second = store.query(generations.of_job, started.id)
    assert (job.generation, job.restarts) == (2, 1)
    assert first.ended_at is not None and second.ended_at is None


def test_training_of_a_generation_lasts_until_the_latest_of_its_reports(store, started):
    number = begin(store, started)
    for at in (12.0, 20.0, 15.0):  # a rank whose clock was set back, or a copy by a peer
        trained = TrainedStep.of({"wall": 1.0}, at)
        store.write(lambda session, trained=trained: generations.add_training(session, started.id, number, trained))
    (row,) = store.query(generations.of_job, started.id)
    assert (row.trained_from, row.trained_until, row.committed_steps) == (11.0, 20.0, 3)


def test_a_generation_begins_in_the_same_transaction_as_a_transition(store, started):
    def recover(session):
        jobs.transition(session, started.id, JobState.RUNNING)
        jobs.transition(session, started.id, JobState.RECOVERING, "rank_died")
        return generations.begin(session, started.id, "rank_died", True, "snapshot", 7)

    assert store.write(recover) == 1
    job = store.query(jobs.get, started.id)
    assert (job.state, job.reason, job.generation) == ("RECOVERING", "rank_died", 1)
    assert store.query(generations.of_job, started.id)[0].resume_step == 7


def test_generation_keeps_its_first_reported_first_step_and_end(store, started):
    number = begin(store, started)
    for at in (5.0, 6.0):
        store.write(lambda session, at=at: generations.mark_first_step(session, started.id, number, at))
        store.write(lambda session, at=at: generations.end(session, started.id, number, at))
    row = store.query(generations.of_job, started.id)[0]
    assert (row.first_step_at, row.ended_at) == (5.0, 5.0)


def test_reports_of_an_older_generation_are_refused_and_those_of_the_new_one_count_from_one(store, started):
    old = begin(store, started)
    row = {"rank": 0, "tensor": 0, "pipeline": 0, "data": 0, "generation": old + 1, "state": "starting"}
    assert store.write(lambda session: jobs.accept_report(session, started.id, old, 0, 57))
    new = begin(store, started, restart=True)
    store.write(lambda session: ranks.replace(session, started.id, [row]))

    def late(session):
        return (
            metrics.record(session, started.id, old, 0, 99, [{"step": 5, "loss": 1.0}]),
            jobs.accept_report(session, started.id, old, 0, 100),
            checkpoints.begin(session, started.id, old, 5, "/x"),
            ranks.set_state(session, started.id, old, 0, "running", pid=1),
        )

    assert store.write(late) == (0, False, None, False)
    job = store.query(jobs.get, started.id)
    assert (job.generation, job.step, job.metrics, job.report_cursor) == (new, 0, {}, {})
    assert store.query(ranks.of_job, started.id)[0].state == "starting"
    assert store.write(lambda session: jobs.accept_report(session, started.id, new, 0, 1))


def test_generation_of_an_unknown_job_and_first_step_of_one_that_never_began_are_refused(store, started):
    with pytest.raises(JobNotFound):
        store.write(lambda session: generations.begin(session, "job_000000000000", "test", False))
    assert not store.write(lambda session: generations.mark_first_step(session, started.id, 1))
