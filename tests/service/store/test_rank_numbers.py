"""Numbers of ranks: the newest, and those before while there is room, of ranks that are the same."""

import pytest

from manta.service.store import generations, ranks
from manta.service.store.ranks import SLOTS
from manta.workers.liveness.rank_samples import EVERY_SECONDS, RankSample, packed


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
    with store.read() as session:
        return ranks.history(session, job, *bounds)


def newest(store, job):
    with store.read() as session:
        return ranks.newest_numbers(session, job)


def test_newest_rank_numbers_are_those_of_the_running_generation(store, job):
    assert newest(store, job) is None
    keep(store, job, (8, 3, [0.5]), (9, 4, [0.25]))
    assert (newest(store, job).step, newest(store, job).generation) == (4, 1)
    store.write(lambda session: generations.begin(session, job, "again", True))
    assert newest(store, job) is None, "what runs now is another process, perhaps elsewhere"
    keep(store, job, (10, 4, [0.25]), generation=2)
    assert newest(store, job).step == 4


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
