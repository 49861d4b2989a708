"""What counts against `max_duration`."""

import pytest

from manta.service.ledger import StateEntry, seconds_taken

CHANGES = [
    StateEntry(at, state)
    for at, state in (
        (0.0, "QUEUED"), (10.0, "STARTING"), (12.0, "RUNNING"), (30.0, "PAUSING"), (35.0, "PAUSED"),
        (90.0, "QUEUED"), (100.0, "STARTING"), (101.0, "RUNNING"), (120.0, "FAILED"), (200.0, "QUEUED"),
        (210.0, "STARTING"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "now", "since", "seconds"),
    [
        (0, 50.0, 0.0, 0.0),
        (1, 5.0, 0.0, 0.0),
        (3, 20.0, 0.0, 10.0),
        (5, 80.0, 0.0, 25.0),
        (8, 110.0, 0.0, 35.0),
        (11, 215.0, 0.0, 50.0),
        (11, 215.0, 200.0, 5.0),
        (3, 20.0, 15.0, 5.0),
        (3, 11.0, 0.0, 2.0),
    ],
    ids=["nothing", "queue", "running", "paused", "resumed", "retried", "since_retry", "in_between", "clock_set_back"],
)
def test_job_duration_counts_time_in_states_that_hold_places(entries, now, since, seconds):
    assert seconds_taken(CHANGES[:entries], now, since) == seconds
