"""Where the ranks of one job run says nothing of another job's."""

import pytest

from manta.service.store import generations, jobs, ranks
from manta.service.store.tables import Rank


def rows(count, generation):
    place = {"tensor": 0, "pipeline": 0, "generation": generation, "state": "running", "pid": 7}
    return [{"rank": rank, "data": rank, **place} for rank in range(count)]


@pytest.fixture
def two(store, submit):
    """Two jobs in their first generations, with three ranks and two."""
    made = [submit().id, submit().id]
    for job_id, count in zip(made, (3, 2), strict=True):
        store.write(lambda s, job_id=job_id: generations.begin(s, job_id, "submitted", False))
        store.write(lambda s, job_id=job_id, count=count: ranks.replace(s, job_id, rows(count, 1)))
    return made


def states(store, job_id):
    with store.read() as session:
        return [(row.rank, row.state, row.pid, row.generation) for row in ranks.of_job(session, job_id)]


def test_ranks_are_replaced_and_ended_for_one_job_alone(store, two):
    first, second = two
    store.write(lambda s: ranks.replace(s, first, rows(1, 2)))
    assert (states(store, first), len(states(store, second))) == ([(0, "running", 7, 2)], 2)
    store.write(lambda s: ranks.end_all(s, first))
    assert states(store, first) == [(0, "exited", None, 2)]
    assert states(store, second) == [(0, "running", 7, 1), (1, "running", 7, 1)]


def test_ranks_that_are_lost_have_no_process_and_the_others_keep_theirs(store, two):
    first, second = two
    store.write(lambda s: ranks.end(s, first, [0, 2, 7]))
    assert states(store, first) == [(0, "exited", None, 1), (1, "running", 7, 1), (2, "exited", None, 1)]
    assert states(store, second) == [(0, "running", 7, 1), (1, "running", 7, 1)]
    assert store.write(lambda s: ranks.set_state(s, second, 1, 1, "exited")), "which it says itself"
    assert states(store, second) == [(0, "running", 7, 1), (1, "exited", None, 1)]


def test_state_reported_by_a_rank_of_an_older_generation_is_ignored(store, two):
    job_id, other = two
    store.write(lambda s: generations.begin(s, job_id, "again", False))
    assert not store.write(lambda s: ranks.set_state(s, job_id, 1, 0, "exited")), "the job is further"
    assert store.write(lambda s: ranks.set_state(s, job_id, 2, 0, "starting")), "and so is this one"
    store.write(lambda s: setattr(jobs.get(s, other), "generation", 0))
    assert not store.write(lambda s: ranks.set_state(s, other, 0, 0, "exited")), "the rank is further"
    assert not store.write(lambda s: ranks.set_state(s, job_id, 2, 3, "starting")), "there is no such rank"
    assert states(store, job_id) == [(0, "starting", 7, 2), (1, "running", 7, 1), (2, "running", 7, 1)]
    assert states(store, other)[0] == (0, "running", 7, 1)


def test_ranks_that_run_are_those_with_a_process_of_jobs_that_are_not_over(store, two):
    first, second = two
    store.write(lambda s: ranks.replace(s, first, [{**row, "node": f"n{row['rank']}"} for row in rows(3, 1)]))
    store.write(lambda s: ranks.replace(s, second, [{**row, "node": "n0"} for row in rows(1, 1)]))
    store.write(lambda s: setattr(s.get(Rank, (first, 1)), "pid", None))
    store.write(lambda s: setattr(jobs.get(s, second), "priority", 1))
    with store.read() as session:
        assert ranks.running(session) == [(second, 0, "n0"), (first, 0, "n0"), (first, 2, "n2")]
    store.write(lambda s: jobs.request_cancel(s, second))
    with store.read() as session:
        assert [job for job, *_ in ranks.running(session)] == [first, first]
