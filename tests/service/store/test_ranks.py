"""Ranks: places, states, and samples of their numbers."""

import pytest
from sqlalchemy import select

from manta.service.store import generations, jobs, ranks
from manta.service.store.ranks import SLOTS
from manta.service.store.tables import Rank, RankNumbers
from manta.workers.liveness.rank_samples import EVERY_SECONDS, RankSample, packed


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
    assert store.write(lambda s: ranks.set_state(s, second, 1, 0, "running", pid=41))
    assert states(store, second) == [(0, "running", 41, 1), (1, "exited", None, 1)]


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
    assert store.query(ranks.running) == [(second, 0, "n0"), (first, 0, "n0"), (first, 2, "n2")]
    store.write(lambda s: jobs.request_cancel(s, second))
    with store.read() as session:
        assert [job for job, *_ in ranks.running(session)] == [first, first]


@pytest.fixture
def job(store, submit):
    job_id = submit().id
    store.write(lambda session: generations.begin(session, job_id, "submitted", False))
    return job_id


def keep(store, job, *samples, generation=1):
    """Samples as (number of the slot, step, own seconds)."""

    def write(session):
        for number, step, own in samples:
            sample = RankSample(step, 1.0, packed(own) if own else None, packed([1.0] * len(own or [0])))
            ranks.store_numbers(session, job, generation, sample, number * EVERY_SECONDS + 0.5)

    store.write(write)


def history(store, job, *bounds):
    return store.query(ranks.history, job, *bounds)


def newest(store, job):
    return store.query(ranks.newest_numbers, job)


def test_newest_rank_numbers_are_those_of_the_running_generation(store, job):
    assert newest(store, job) is None
    keep(store, job, (8, 3, [0.5]), (9, 4, [0.25]))
    assert (newest(store, job).step, newest(store, job).generation) == (4, 1)
    store.write(lambda session: generations.begin(session, job, "again", True))
    assert newest(store, job) is None, "what runs now is another process, perhaps elsewhere"
    keep(store, job, (10, 4, [0.25]), generation=2)
    assert newest(store, job).step == 4


def test_expert_tokens_are_kept_of_the_newest_sample_only(store, job):
    assert store.query(ranks.expert_tokens, job) is None

    def write(session):
        for step in (3, 4):
            sample = RankSample(step, 1.0, None, packed([1.0]), expert_tokens=packed([step, 70_000.0]))
            ranks.store_numbers(session, job, 1, sample, step * EVERY_SECONDS)

    store.write(write)
    assert store.query(ranks.expert_tokens, job) == (4, [4.0, 70_000.0])
    with store.read() as session:
        kept = session.scalars(select(RankNumbers.expert_tokens).order_by(RankNumbers.slot))
        assert [tokens is None for tokens in kept] == [True, False]


def test_rank_history_is_oldest_first_and_limited_by_first_step_and_count(store, job):
    keep(store, job, *((number, number, [0.5, number]) for number in range(1, 11)))
    numbers = history(store, job)
    assert numbers.steps == list(range(1, 11))
    assert numbers.own_seconds[2] == [0.5, 3.0]
    assert numbers.times[0] == EVERY_SECONDS + 0.5
    assert history(store, job, 7).steps == [8, 9, 10]
    assert history(store, job, 0, 2).steps == [9, 10]
    assert history(store, job, 10).steps == []


def test_rank_history_keeps_a_limited_number_of_the_newest_steps(store, job):
    keep(store, job, *((number, number + 1, [1.0]) for number in range(2 * SLOTS)))
    assert history(store, job).steps == list(range(SLOTS + 1, 2 * SLOTS + 1))


def test_rank_history_of_many_ranks_is_shortened_to_a_total_of_numbers(store, job, monkeypatch):
    monkeypatch.setattr(ranks, "MAX_NUMBERS", 10)
    keep(store, job, *((number, number, [1.0] * 4) for number in range(1, 6)))
    assert history(store, job).steps == [4, 5]


def test_history_leaves_out_repeated_steps_and_other_sets_of_ranks(store, job):
    keep(store, job, (1, 10, [1.0, 1.0, 1.0]), (2, 20, [1.0, 2.0]), (3, 30, [1.0, 3.0]), (4, 25, [1.0, 4.0]))
    numbers = history(store, job)
    assert (numbers.steps, numbers.own_seconds) == ([20, 25], [[1.0, 2.0], [1.0, 4.0]])


def test_ranks_without_a_measured_time_of_their_own_have_no_history(store, job):
    keep(store, job, (1, 10, None))
    assert history(store, job).steps == []
    assert newest(store, job).own_seconds is None


def test_rank_numbers_of_one_job_are_not_those_of_another(store, submit, job):
    other = submit().id
    keep(store, job, (1, 10, [1.0]))
    assert (newest(store, other), history(store, other).steps) == (None, [])
