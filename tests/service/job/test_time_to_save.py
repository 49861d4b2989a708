"""How long before the end a job begins to save: twice what it takes, and something to spare."""

import asyncio

import pytest

from manta.service.job.leave import (
    MAX_SAVE_SECONDS,
    SAVE_SECONDS,
    SPARE_SECONDS,
    UNKNOWN_SAVE_SECONDS,
    seconds_allowed,
    seconds_to_save,
    time_to_save,
)
from manta.service.job.record import JobRecord
from manta.service.store import checkpoints, generations, metrics


@pytest.mark.parametrize(
    ("saves", "step", "seconds"),
    [
        ([], None, 2 * UNKNOWN_SAVE_SECONDS),
        ([4.0], None, 8.0),
        ([4.0], 1.5, 11.0),
        ([4.0], "nan", 8.0),
        ([3.0, 400.0, 5.0], 0.0, 10.0),
    ],
    ids=["nothing_known", "one_save", "and_a_step", "a_step_without_a_number", "one_that_was_noted_late"],
)
def test_time_to_save_includes_the_save_and_step_in_progress(saves, step, seconds):
    assert seconds_to_save(saves, step) == seconds + SPARE_SECONDS


def test_time_to_save_is_bounded_for_implausible_measurements():
    assert seconds_to_save([1e6], 1e6) == MAX_SAVE_SECONDS


@pytest.mark.parametrize(("saves", "allowed"), [([], SAVE_SECONDS), ([0.5], SAVE_SECONDS), ([400.0], 810.0)])
def test_time_to_save_is_extended_for_slow_saves(saves, allowed):
    assert seconds_allowed(seconds_to_save(saves, None)) == allowed


def test_last_saves_and_the_last_step_of_the_job_count(store, started):
    def save(session, step, seconds):
        row = checkpoints.begin(session, started.id, 1, step, f"/x/{step}")
        checkpoints.complete(session, row.id, 1)
        row.completed_at = row.created_at + seconds

    store.write(lambda s: generations.begin(s, started.id, "submitted", False))
    for step in range(1, 11):
        store.write(lambda s, step=step: save(s, step, 100.0 if step <= 5 else 7.0))
    store.write(lambda s: checkpoints.begin(s, started.id, 1, 11, "/x/11"))  # not complete: nobody knows
    store.write(lambda s: metrics.record(s, started.id, 1, 0, 1, [{"step": 11, "step_seconds": 0.5}]))
    assert asyncio.run(time_to_save(JobRecord(store, started.id))) == 14.0 + 1.0 + SPARE_SECONDS
