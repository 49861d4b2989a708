"""How often is snapshotted follows from what it costs, and is the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from workers.comm.comm import Comm
from workers.config import ParallelConfig
from workers.snapshot.interval import AGREE_EVERY, FREE_SECONDS, STALL_SHARE, Pace, steps_between

seconds = st.floats(1e-6, 1e3)


@given(seconds, seconds)
def test_the_fewest_steps_that_keep_the_stalls_to_their_share(stall, step):
    every = steps_between(stall, step)
    assert every >= 1
    if stall > FREE_SECONDS:
        assert stall / every <= STALL_SHARE * step * (1 + 1e-9)
    if every > 1:
        assert stall > FREE_SECONDS
        assert stall / (every - 1) > STALL_SHARE * step * (1 - 1e-9)


@given(seconds, seconds, seconds)
def test_a_longer_stall_never_means_more_snapshots(stall, more, step):
    assume(math.isfinite(stall + more))
    assert steps_between(stall + more, step) >= steps_between(stall, step)


def ranks_with_unlike_clocks(comm: Comm) -> list[tuple[int, list[int]]]:
    """(steps between snapshots, steps that are due) over some steps; rank 1 is held up by its snapshots."""
    pace, found = Pace("auto"), []
    pace.begin()
    for step in range(1, 3 * AGREE_EVERY):
        pace.note_stall(0.0 if comm.rank == 0 else 0.004)
        pace.note_step(step, 0.1 + 0.01 * comm.rank, comm)
        found.append((pace.every, pace.due(step)))
    pace.begin()
    return [*found, (pace.every, True)]


def test_all_ranks_use_the_same_number_which_is_that_of_the_slowest(ranks: Any):
    first, second = ranks.run(ParallelConfig(data=2), ranks_with_unlike_clocks)
    assert first == second
    assert [every for every, _ in first[:-1]] == [1] * (AGREE_EVERY - 1) + [4] * (2 * AGREE_EVERY)
    assert first[-1] == (1, True), "a new generation knows nothing yet"


def generation_that_begins_late(comm: Comm) -> list[int]:
    """Steps between snapshots over a generation's steps, which are held up by them."""
    pace, found = Pace("auto"), []
    pace.begin()
    for step in range(AGREE_EVERY - 2, 3 * AGREE_EVERY + 1):
        pace.note_stall(0.004)
        pace.note_step(step, 0.1, comm)
        found.append(pace.every)
    return found


def test_a_generation_is_judged_by_a_whole_window_of_its_steps(ranks: Any):
    first, second = ranks.run(ParallelConfig(data=2), generation_that_begins_late)
    assert first == second == [1] * (AGREE_EVERY + 2) + [4] * (AGREE_EVERY + 1)


def test_a_number_that_was_asked_for_stays():
    pace = Pace(3)
    pace.begin()
    for step in range(1, 40):
        pace.note_stall(1.0)
        pace.note_step(step, 0.1, None)  # type: ignore[arg-type]  # nothing is exchanged
    assert pace.every == 3
    assert [step for step in range(10) if pace.due(step)] == [0, 3, 6, 9]
