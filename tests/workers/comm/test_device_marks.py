"""Marks where a GPU waits for others, over pretended ones: for what, for whom, and for how long."""

import pytest
import torch
from pretended_devices import CPU, Gang, Network, no_thread

from manta.workers.comm import backend
from manta.workers.comm import comm as comm_module
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.liveness.rank_samples import WINDOW, Stragglers

NUMBER = torch.zeros(8)


@pytest.fixture
def gang(tmp_path):
    """Ranks of a layout with all axes, in their first step."""
    with no_thread():
        grid = RankGrid(ParallelConfig(tensor=2, pipeline=2, data=2))
        made = Gang(grid, Network(), lambda rank: Progress.shared(tmp_path, rank))
        for comm in made.comms:
            comm.step.begin(1)
        yield made


def device_of(tmp_path, rank):
    """What the record of a rank says of its device."""
    reader = ProgressReader(progress_path(tmp_path, rank))
    record = reader.read().device
    reader.close()
    return record


@pytest.mark.parametrize(("axis", "channel"), [("tensor", 0), ("data", 2), ("world", 4)])
def test_device_marks_tell_which_collective_the_device_waits_for(gang, tmp_path, axis, channel):
    comm = gang.comms[0]
    starts = (
        lambda: comm.start_all_reduce(axis, NUMBER),
        lambda: comm.start_all_gather(axis, NUMBER)[1],
        lambda: comm.start_reduce_scatter(axis, NUMBER)[1],
        lambda: comm.start_all_to_all(axis, [], []),
    )
    works = [start() for start in starts]
    works[2].wait()
    gang.run()
    seen = device_of(tmp_path, 0)
    assert (seen.waits, seen.channel, seen.number, seen.waits_for) == (True, channel, 3, None)
    assert seen.counts[axis] == 4


def test_device_marks_tell_which_peer_a_message_waits_for(gang, tmp_path):
    """Ranks 0 and 2 are the two stages of a pipeline."""
    first, second = gang.comms[0], gang.comms[2]
    first.receive(1, NUMBER).wait()
    sending = second.send(0, NUMBER)
    second.send(0, NUMBER).wait()
    assert not sending.done
    gang.run()
    assert device_of(tmp_path, 0).pending == 0, "what it waited for has come"
    seen = device_of(tmp_path, 2)
    assert (seen.waits, seen.channel, seen.number, seen.waits_for, seen.sending) == (True, 1, 2, 0, True)
    first.receive(1, NUMBER).wait()
    first.receive(1, NUMBER).wait()
    gang.run()
    seen = device_of(tmp_path, 0)
    assert (seen.waits, seen.number, seen.waits_for, seen.sending) == (True, 3, 2, False)
    assert seen.counts == {**dict.fromkeys(seen.counts, 0), "received": 3}


def test_device_marks_follow_the_phase_of_the_device_rather_than_the_host(gang, tmp_path):
    comm, device = gang.comms[0], gang.devices[0]
    with comm.step.phase("forward", 1):
        device.queue("compute", float("inf"))
    with comm.step.phase("backward", 1):
        gang.run()
    seen = device_of(tmp_path, 0)
    assert (seen.phase, seen.micro_batch, seen.step) == ("forward", 1, 1)


def test_device_marks_end_when_their_generation_is_closed(gang, tmp_path):
    gang.comms[0].all_reduce("world", NUMBER)
    gang.run()
    assert device_of(tmp_path, 0) is not None
    gang.comms[0].close()
    assert device_of(tmp_path, 0) is None


@pytest.mark.parametrize("slow", [None, 5])
def test_straggler_is_named_by_the_time_of_its_own_kernels(gang, slow):
    """All ranks take as long for a step, since they wait for the slow one, and no host waits at all."""
    ranks = range(gang.grid.world_size)
    stragglers = Stragglers([gang.grid.coordinates(rank).pipeline for rank in ranks])
    named = []
    for step in range(2, WINDOW + 6):
        for comm, device in zip(gang.comms, gang.devices, strict=True):
            comm.step.begin(step)
            device.queue("compute", 0.3 if comm.rank == slow else 0.1)
            comm.all_reduce("tensor", NUMBER)
            device.queue("compute", 0.1)
            comm.all_reduce("world", NUMBER)
        gang.run()
        named += stragglers.add([comm.own_seconds for comm in gang.comms])
    assert [each.rank for each in named] == ([] if slow is None else [slow])
    if slow is not None:
        assert (round(named[0].own_seconds, 6), round(named[0].usual_seconds, 6)) == (0.4, 0.2)
        took = [comm.device_step_seconds[0] for comm in gang.comms]
        assert took == pytest.approx([0.4] * len(ranks))


def test_progress_record_keeps_device_times_of_steps(gang, tmp_path):
    comm, device = gang.comms[0], gang.devices[0]
    for step in (2, 3, 4):
        comm.step.begin(step)
        device.queue("compute", 2.0)
        gang.run()
        comm.progress.commit(step, comm.device_step_seconds)
    reader = ProgressReader(progress_path(tmp_path, 0))
    record = reader.read()
    reader.close()
    assert (record.step_seconds[-1], record.own_seconds[-1]) == (2.0, 2.0)


@pytest.mark.parametrize("backend", [None, "links", "process_groups"])
def test_device_marks_exist_only_where_the_host_runs_ahead(monkeypatch, backend):
    grid, cuda = RankGrid(ParallelConfig()), torch.device("cuda")
    assert Comm(grid, 0, CPU, backend)._trail is None
    monkeypatch.setattr(comm_module, "StepPhases", lambda *arguments, trail=None: None)
    assert (Comm(grid, 0, cuda, backend)._trail is None) == (backend == "links")


def test_events_of_a_gpu_measure_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: options)
    assert backend.new_event() == {"enable_timing": True}
