"""The culprit of a hang over NCCL, where hosts run ahead: found by how far the devices have come, in drawn programs
over real `Comm`s whose devices are pretended."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.recovery.waits import RankView, find_culprits, waiting_for
from manta.workers.comm.grid import AXES
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.protocol.reports import Position, TrainerStatus
from tests.service.support.drawn_hangs import LAYOUTS, grid_of, hang


def views(gang, tmp_path, known=True, unable=None):
    """What the agents of a gang tell whose ranks are all overdue. `known`: whether somebody looks at the devices;
    `unable`: a rank whose process cannot any more."""
    seen = []
    for rank in range(gang.grid.world_size):
        reader = ProgressReader(progress_path(tmp_path, rank))
        record = reader.read()
        reader.close()
        device = replace(record.device, fresh=rank != unable) if known else None
        status = TrainerStatus(1, overdue=True, record=Position.of(record, device))
        seen.append(RankView.of(rank, status))
    return seen


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Where the records are."""
    folder = tmp_path_factory.mktemp("records")
    return folder, lambda rank: Progress.shared(folder, rank)


@pytest.mark.parametrize("how", ["device", "host", "interpreter"])
@settings(max_examples=50, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_rank_that_stands_is_found_whether_its_device_host_or_interpreter_does(shared, how, layout, seed):
    """Where something holds its interpreter, what is known of its device was true before."""
    folder, progress = shared
    gang, hung = hang(layout, seed, "device" if how == "device" else "host", progress=progress)
    seen = views(gang, folder, unable=hung if how == "interpreter" else None)
    verdict = find_culprits(seen, gang.grid.group)
    assert (verdict.kind, verdict.ranks) == ("ranks", (hung,))
    if how != "interpreter":
        waits = {view.rank for view in seen if view.waits_in or view.waits_for is not None}
        assert set(waiting_for(seen, hung, gang.grid.group)) == waits - {hung}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_device_hang_is_blamed_on_a_silent_rank_others_wait_for_and_on_none_that_may_continue(shared, layout, seed):
    folder, progress = shared
    gang, hung = hang(layout, seed, "device", progress=progress)
    seen = views(gang, folder)
    continuing = [replace(view, overdue=view.overdue and view.rank != hung) for view in seen]
    assert find_culprits(continuing, gang.grid.group).kind == "nobody"
    seen[hung] = RankView(hung, answered=False)
    if any(view.waits_in or view.waits_for is not None for view in seen):
        assert find_culprits(seen, gang.grid.group).ranks == (hung,)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_network_failure_for_all_ranks_is_blamed_on_the_gang(shared, layout, seed):
    folder, progress = shared
    last = random.Random(seed).randrange(1, 4)
    gang, _ = hang(layout, seed, "nobody", lambda meeting: meeting[-1] >= last, progress)
    seen = views(gang, folder)
    if not any(view.waits_in or view.waits_for is not None for view in seen):
        return  # so little was said that all of it got through
    verdict = find_culprits(seen, gang.grid.group)
    assert verdict.kind == "gang", verdict


def test_hang_of_a_device_cannot_be_found_from_host_queues_alone(shared):
    """What the marks are for: by what hosts have queued, all ranks are alike."""
    folder, progress = shared
    gang, hung = hang((1, 1, 4), 3, "device", progress=progress)
    assert find_culprits(views(gang, folder, known=False), gang.grid.group).kind == "gang"
    assert find_culprits(views(gang, folder), gang.grid.group).ranks == (hung,)


def test_device_hang_search_visits_each_group_once():
    grid, seen = grid_of((8, 48, 8)), []

    def group(axis, rank):
        seen.append(len(grid.group(axis, rank)))
        return grid.group(axis, rank)

    counts = dict.fromkeys(AXES, 7)
    ready = RankView(0, overdue=True, counts=counts, on_device=True)
    views = [replace(ready, rank=rank, waits_in=("world", 7)) for rank in range(grid.world_size)]
    assert find_culprits(views, group).kind == "gang"
    views[2900] = replace(ready, rank=2900, counts={**counts, "world": 6})
    verdict = find_culprits(views, group)
    assert (verdict.kind, verdict.ranks) == ("ranks", (2900,))
    assert sum(seen) == 2 * grid.world_size
