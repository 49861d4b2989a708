"""How often is snapshotted follows from what it costs, and is the same on all ranks."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepped_snapshots import parts_of

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.snapshot.interval import AGREE_EVERY, SnapshotInterval
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.snapshot.snapshots import Snapshots


def ranks_with_unlike_clocks(comm: Comm) -> list[tuple[int, list[int]]]:
    """(steps between snapshots, steps that are due) over some steps; rank 1 is held up by its snapshots."""
    interval, chosen = SnapshotInterval("auto"), []
    interval.restart()
    for step in range(1, 3 * AGREE_EVERY):
        interval.note_stall(0.0 if comm.rank == 0 else 0.004)
        interval.note_step(step, 0.1 + 0.01 * comm.rank, comm)
        chosen.append((interval.every, interval.due(step)))
    interval.restart()
    return [*chosen, (interval.every, True)]


def test_all_ranks_use_the_snapshot_interval_of_the_slowest(ranks: Any):
    first, second = ranks.run(ParallelConfig(data=2), ranks_with_unlike_clocks)
    assert first == second
    assert [every for every, _ in first[:-1]] == [1] * (AGREE_EVERY - 1) + [4] * (2 * AGREE_EVERY)
    assert first[-1] == (1, True), "a new generation knows nothing yet"


def generation_that_begins_late(comm: Comm) -> list[int]:
    """Steps between snapshots over a generation's steps, which are held up by them."""
    interval, chosen = SnapshotInterval("auto"), []
    interval.restart()
    for step in range(AGREE_EVERY - 2, 3 * AGREE_EVERY + 1):
        interval.note_stall(0.004)
        interval.note_step(step, 0.1, comm)
        chosen.append(interval.every)
    return chosen


def test_interval_changes_only_after_a_whole_window_of_the_generations_steps(ranks: Any):
    first, second = ranks.run(ParallelConfig(data=2), generation_that_begins_late)
    assert first == second == [1] * (AGREE_EVERY + 2) + [4] * (AGREE_EVERY + 1)


def exchanges(interval: SnapshotInterval, first: int) -> list[tuple[int, list[float]]]:
    """(Step, what this rank says there) of a generation whose first step is `first`, and whose snapshots hold it up for
    longer and longer."""
    said: list[tuple[int, list[float]]] = []
    comm = Comm(RankGrid(ParallelConfig()), 0, torch.device("cpu"))
    comm.all_reduce = lambda axis, tensor, largest: said.append((step, tensor.tolist()))  # type: ignore[method-assign]
    interval.restart()
    for step in range(first, first + 3 * AGREE_EVERY):
        if step > first:
            interval.note_stall(0.001 * (step - first))
        interval.note_step(step, 0.1 + 0.001 * (step - first), comm)
    return said


@pytest.mark.parametrize("first", [1, AGREE_EVERY - 2, AGREE_EVERY, AGREE_EVERY + 1])
def test_surviving_process_exchanges_intervals_at_the_same_steps_as_a_new_one(first):
    """Else one rank would wait for the other in an exchange that the other knows nothing of."""
    lives_on = SnapshotInterval("auto")
    exchanges(lives_on, 1)
    again = exchanges(lives_on, first)
    assert again == exchanges(SnapshotInterval("auto"), first)
    assert len(again) >= 2


def test_snapshot_interval_set_by_the_user_does_not_change():
    interval = SnapshotInterval(3)
    interval.restart()
    for step in range(1, 40):
        interval.note_stall(1.0)
        interval.note_step(step, 0.1, None)  # type: ignore[arg-type]  # nothing is exchanged
    assert interval.every == 3
    assert [step for step in range(10) if interval.due(step)] == [0, 3, 6, 9]


class PromisedRank:
    """One rank's snapshots, made while the interval changes as it is told to."""

    def __init__(self, folder: Path, rank: int, every: int):
        self.state = [torch.zeros(4)]
        self.snapshots = Snapshots(folder, rank, parts_of(self.state), b"0" * 16)
        self.interval = SnapshotInterval("auto")
        self.interval.every = every
        self.snapshots.save(0)
        self._may_copy = threading.Event()

    @property
    def steps(self) -> set[int]:
        """What another process finds when this one dies now."""
        return set(committed_steps(self.snapshots.path))

    def commit(self, step: int) -> None:
        """Commit a step and begin its snapshot where it is due, of which no byte is copied before `agree`."""
        self.state[0].fill_(step)
        if self.interval.due(step):
            self._may_copy.clear()
            self.snapshots._copier._thread.submit(self._may_copy.wait, 30)
            self.snapshots.start(step)

    def agree(self) -> None:
        """What precedes the agreement on the next step."""
        self._may_copy.set()
        self.snapshots.finish()


def steps_redone(folder: Path, intervals: list[int]) -> Iterator[tuple[int, int]]:
    """For each step, while the interval is set every AGREE_EVERY steps: (how many committed steps a death costs at
    most, how many are promised). Two ranks are as far apart as they can be: one has committed a step whose snapshot has
    just begun or is whole, the other has agreed to that step and dies before it commits it, or right after it."""
    first, second = ranks = [PromisedRank(folder, rank, intervals[0]) for rank in range(2)]
    in_force = [intervals[0]]  # since the newest step that was due
    for step in range(1, AGREE_EVERY * len(intervals) + 1):
        for rank in ranks:
            rank.agree()  # to this step, so all snapshots of earlier ones are whole
        first.commit(step)
        redone = [step - max(first.steps & second.steps)]
        second.commit(step)
        redone.append(step - max(first.steps & second.steps))
        first.agree()
        redone.append(step - max(first.steps & second.steps))
        yield max(redone), sum(every - 1 for every in in_force[:-1]) + in_force[-1]
        if first.interval.due(step):
            in_force = in_force[-1:]
        if step % AGREE_EVERY == 0 and step // AGREE_EVERY < len(intervals):
            every = intervals[step // AGREE_EVERY]
            in_force += [every] if every != in_force[-1] else []
            for rank in ranks:
                rank.interval.every = every
    for rank in ranks:
        rank.agree()
        rank.snapshots.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(intervals=st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_a_death_at_any_moment_costs_no_more_steps_than_the_interval_in_force(tmp_path, intervals):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    assert all(redone <= promised for redone, promised in steps_redone(folder, intervals))


@pytest.mark.parametrize(("intervals", "worst"), [([1, 1], 1), ([5, 5], 5), ([3, 3, 8], 3 - 1 + 8)])
def test_most_steps_that_a_death_costs_follow_from_the_intervals_in_force(tmp_path, intervals, worst):
    """The last multiple of 3 up to step 32, where the interval becomes 8, is 30; the next of 8 is 40."""
    assert max(redone for redone, _ in steps_redone(tmp_path, intervals)) == worst
