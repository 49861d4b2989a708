"""When queued jobs can be expected to start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.states import JobState
from manta.service.store import generations, jobs, metrics
from manta.service.store.expected_starts import Ending, expected_starts, starts
from manta.workers.config import JobSpec


@pytest.mark.parametrize(
    ("needed", "free", "endings", "wanted"),
    [
        ([8], 1, [(60.0, 7)], {0: 60.0}),
        ([8], 1, [(60.0, 4), (90.0, 3)], {0: 90.0}),
        ([2, 2, 4], 4, [(30.0, 4)], {0: 0.0, 1: 0.0, 2: 30.0}),
        ([8, 1], 4, [(None, 4)], {}),  # the first one's start is unknown, and the second one waits behind it
        ([99, 1], 0, [(30.0, 4)], {1: 30.0}),  # the first one never fits and steps aside
        ([4, 4], 0, [(30.0, 4)], {0: 30.0}),  # nobody knows how long the first one will run
    ],
)
def test_queued_job_starts_when_enough_has_been_released_for_it_and_those_ahead(needed, free, endings, wanted):
    waiting = [(str(place), units) for place, units in enumerate(needed)]
    assert starts(waiting, free, [Ending(*each) for each in endings]) == {str(at): when for at, when in wanted.items()}


@given(
    st.lists(st.integers(1, 9), max_size=6), st.integers(0, 9), st.lists(st.tuples(st.floats(0, 99), st.integers(1, 9)))
)
def test_expected_starts_follow_the_order_of_the_queue(needed, free, endings):
    found = starts([(str(at), units) for at, units in enumerate(needed)], free, [Ending(*each) for each in endings])
    assert list(found.values()) == sorted(found.values())
    assert sum(needed[int(at)] for at in found) <= free + sum(units for _, units in endings)


def test_expected_start_is_that_of_the_running_job_that_ends_first(store):
    def submit(steps):
        document = {
            "model": {"layers": 2, "hidden_size": 8, "heads": 2, "sequence_length": 8, "vocabulary_size": 8},
            "data": {"source": "python-stdlib"},
            "train": {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1},
            "parallel": {"tensor": 2, "data": 2},
        }
        return store.write(lambda session: jobs.create(session, JobSpec.model_validate(document)))[0].id

    running, first, second = submit(50), submit(10), submit(10)

    def run(session):
        jobs.transition(session, running, JobState.STARTING)
        generation = generations.begin(session, running, "submitted", False)
        jobs.transition(session, running, JobState.RUNNING)
        row = {"step": 10, "time": 1.0, "step_seconds": 0.5, "tokens_per_second": 1.0, "loss": 1.0}
        metrics.record(session, running, generation, 0, 1, [row])

    store.write(run)
    assert store.query(expected_starts) == {}, "the scheduler has not looked at the queue yet"
    lacks = {"unit": "slots", "needed": 4, "available": 0, "free": 1}
    store.write(lambda session: jobs.set_waiting(session, first, lacks, "insufficient_slots"))
    assert store.query(expected_starts) == {first: pytest.approx(20.0)}
    store.write(lambda session: jobs.request_cancel(session, first))
    assert store.query(expected_starts) == {}, "nothing is known of the second one before it has its turn"
    store.write(lambda session: jobs.set_waiting(session, second, lacks, "insufficient_slots"))
    store.write(lambda session: jobs.request_cancel(session, running))
    assert store.query(expected_starts) == {second: 0.0}
