"""A Comm moves the same numbers whatever carries its messages."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_specs import axes
from rank_threads import HOST, SECRET, NotingProgress, run_threads

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.links_backend import HostStaged
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.comm.shared_work import SharedWork
from manta.workers.config import ParallelConfig
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.timing.step_phases import StepPhases

CPU = torch.device("cpu")


def every_collective(comm: Comm, staged: bool = False) -> dict[str, tuple[list[float], list[float]]]:
    """(Result, what it has to be) of every kind of communication along every axis."""
    if staged:
        comm._backend = HostStaged(comm._backend)
    pairs = {}
    for axis in (axis for axis in comm.grid.axes if axis != "pipeline" and comm.size(axis) > 1):
        size, index, ranks = comm.size(axis), comm.index(axis), comm._ranks[axis]
        total = torch.tensor([float(comm.rank), 1.0])
        comm.all_reduce(axis, total)
        pairs[f"sum over {axis}"] = total.tolist(), [float(sum(ranks)), float(size)]
        largest = torch.tensor([float(comm.rank), -float(comm.rank)])
        comm.all_reduce(axis, largest, largest=True)
        pairs[f"largest of {axis}"] = largest.tolist(), [float(max(ranks)), -float(min(ranks))]
        if axis == "world":  # its ranks are linked to the first one only
            continue
        gathered = comm.all_gather(axis, torch.full((2,), float(comm.rank)))
        pairs[f"all of {axis}"] = gathered.tolist(), [float(rank) for rank in ranks for _ in range(2)]
        mine = comm.reduce_scatter(axis, torch.arange(2.0 * size) + comm.rank)
        pairs[f"part of {axis}"] = mine.tolist(), [sum(2.0 * index + i + rank for rank in ranks) for i in range(2)]
        outgoing = [[torch.tensor([10.0 * comm.rank + rank])] for rank in ranks]
        incoming = [[torch.zeros(1)] for _ in ranks]
        comm.start_all_to_all(axis, outgoing, incoming).wait()
        arrived = [incoming[i][0].item() for i in range(size) if i != index]
        pairs[f"each of {axis}"] = arrived, [10.0 * rank + comm.rank for rank in ranks if rank != comm.rank]
    stages, stage = comm.size("pipeline"), comm.index("pipeline")
    if stages > 1:
        sends = [comm.send((stage + way) % stages, torch.tensor([float(comm.rank), float(way)])) for way in (1, -1)]
        for way in (1, -1):
            message = torch.zeros(2)
            source = (stage - way) % stages
            comm.receive(source, message).wait()
            # With two stages both messages come from the same rank, in the order in which they were sent.
            pairs[f"message {way}"] = message.tolist(), [float(comm._ranks["pipeline"][source]), float(way)]
        for send in sends:
            send.wait()
    comm.barrier()
    return pairs


def groups_that_were_made(comm: Comm) -> set[str]:
    """Names of the process groups."""
    assert isinstance(comm._backend, ProcessGroups)
    return set(comm._backend._groups)


LAYOUTS = [*map(axes, [(1, 3, 1), (2, 3, 1), (1, 4, 2), (2, 2, 2)]), {"tensor": 2, "context": 2, "data": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("backend", ["links", "process_groups"])
def test_every_collective_delivers_the_expected_values_in_each_layout(ranks, layout, backend):
    for pairs in ranks.run(ParallelConfig(**layout), every_collective, backend=backend):
        for name, (got, expected) in pairs.items():
            assert got == expected, name


def test_collectives_through_host_memory_deliver_the_expected_values(ranks):
    for pairs in ranks.run(ParallelConfig(**axes((2, 2, 2))), every_collective, True):
        for name, (got, expected) in pairs.items():
            assert got == expected, name


def test_every_direction_of_a_pipeline_has_a_process_group(ranks):
    for names in ranks.run(ParallelConfig(**axes((1, 3, 1))), groups_that_were_made, backend="process_groups"):
        assert {"world", "pipeline_up", "pipeline_down"} <= names


def test_collectives_of_a_single_rank_need_no_connection():
    comm = Comm(RankGrid(ParallelConfig()), 0, CPU)
    tensor = torch.ones(3)
    comm.all_reduce("world", tensor)
    assert comm.all_gather("tensor", tensor) is tensor
    assert comm.reduce_scatter("data", tensor) is tensor
    into = torch.zeros(3)
    assert comm.all_gather("data", tensor, into) is into
    assert torch.equal(into, tensor)
    part, work = comm.start_reduce_scatter("data", tensor, out := torch.zeros(3))
    work.wait()
    assert part is out and torch.equal(out, tensor)
    comm.start_all_to_all("data", [[]], [[]]).wait()
    comm.barrier()
    comm.close()


def test_collective_before_joining_a_generation_is_refused():
    comm = Comm(RankGrid(ParallelConfig(tensor=2)), 0, CPU)
    with pytest.raises(PeerLost, match="has not joined a generation, or has left it"):
        comm.all_reduce("tensor", torch.ones(1))


def test_rank_cannot_connect_in_a_generation_that_has_ended():
    comm = Comm(RankGrid(ParallelConfig(tensor=2)), 0, CPU)
    comm.end(3)
    with pytest.raises(PeerLost, match="generation 3 is over"):
        comm.connect(dist.HashStore(), 3, HOST, SECRET)


def test_rank_waiting_for_a_peer_to_join_is_freed_when_its_generation_ends():
    """The other rank never comes: nothing but the end of the generation can free this one."""
    progress = NotingProgress()
    comm = Comm(RankGrid(ParallelConfig(tensor=2)), 0, CPU, progress=progress)

    def body(rank: int) -> None:
        if rank == 0:
            comm.connect(dist.HashStore(), 1, HOST, SECRET)
        else:
            progress.waits.wait()
            comm.end(1)

    lost, _ = run_threads(2, body)
    assert isinstance(lost, PeerLost)


def test_comm_reconnects_both_ranks_in_the_next_generation():
    store, grid = dist.HashStore(), RankGrid(ParallelConfig(tensor=2))

    def body(rank: int) -> list[float]:
        comm, sums = Comm(grid, rank, CPU), []
        for generation in (1, 2):
            comm.connect(store, generation, HOST, SECRET)
            total = torch.tensor([float(rank + generation)])
            comm.all_reduce("tensor", total)
            sums.append(total.item())
            comm.barrier()
            comm.close()
        return sums

    assert run_threads(2, body) == [[3.0, 5.0], [3.0, 5.0]]


def test_comm_closed_by_one_rank_frees_the_peer_that_waits():
    store, grid = dist.HashStore(), RankGrid(ParallelConfig(tensor=2))

    def body(rank: int) -> None:
        comm = Comm(grid, rank, CPU)
        comm.connect(store, 1, HOST, SECRET)
        try:
            if rank == 0:
                comm.all_reduce("tensor", torch.ones(1))
        finally:
            comm.close()

    lost, left = run_threads(2, body)
    assert isinstance(lost, PeerLost)
    assert left is None


def test_comm_end_of_an_earlier_generation_is_ignored():
    """An order that was held up may come when the rank has long met the others again."""
    store, grid = dist.HashStore(), RankGrid(ParallelConfig(tensor=2))

    def body(rank: int) -> float:
        comm = Comm(grid, rank, CPU)
        comm.connect(store, 2, HOST, SECRET)
        comm.end(1)
        total = torch.tensor([float(rank)])
        comm.all_reduce("tensor", total)
        comm.barrier()
        comm.close()
        return total.item()

    assert run_threads(2, body) == [1.0, 1.0]


class Moves:
    """A communication of a stand-in for the backend: its wait moves the clock."""

    done = True

    def __init__(self, wait):
        self.wait = wait


class NotingBackend:
    """Notes what it is asked for; each wait takes four seconds, in three of which nothing moves."""

    def __init__(self, comm: Comm, now: list[float]):
        self.asked, self._comm, self._now = [], comm, now

    def _wait(self) -> None:
        self._now[0] += 4.0
        self._comm.progress.moved(waited=3.0)

    def __getattr__(self, name: str):
        def start(*arguments):
            self.asked.append((name, *(each for each in arguments if isinstance(each, bool | int | str))))
            return Moves(self._wait)

        return start


@pytest.fixture
def noting(tmp_path, request):
    """Rank 0 of a layout with every axis, whose step is being measured by a clock that its waits move."""
    now = [0.0]
    layout = ParallelConfig(tensor=2, pipeline=2, context=2, data=2)
    comm = Comm(RankGrid(layout), 0, CPU, request.param, Progress.shared(tmp_path, 0))
    comm.step = StepPhases(CPU, comm.progress, lambda: now[0])
    comm._backend = NotingBackend(comm, now)
    comm.progress.moved(waited=10.0)
    comm.step.begin(1, measure=True)
    reader = ProgressReader(progress_path(tmp_path, 0))
    yield comm, reader
    reader.close()


def spent(comm: Comm) -> dict[str, float]:
    """Seconds by part of the step."""
    return {part: seconds for part, seconds in comm.step.parts.end().items() if seconds}


@pytest.mark.parametrize("noting", ["links"], indirect=True)
@pytest.mark.parametrize(
    ("axis", "part"),
    [
        ("tensor", "tensor_communication"),
        ("data", "data_communication"),
        ("holders", "data_communication"),
        ("context", "context_communication"),
        ("embedding", "other"),
        ("world", "other"),
    ],
)
def test_each_collective_is_counted_and_timed_as_one_of_its_axis(noting, axis, part):
    comm, reader = noting
    tensor = torch.zeros(comm.size(axis))
    comm.all_reduce(axis, tensor)
    comm.all_reduce(axis, tensor, largest=True)
    comm.all_gather(axis, tensor)
    comm.reduce_scatter(axis, tensor)
    comm.start_all_to_all(axis, [], []).wait()
    assert comm._backend.asked == [
        ("start_all_reduce", axis, False),
        ("start_all_reduce", axis, True),
        ("start_all_gather", axis),
        ("start_reduce_scatter", axis),
        ("start_all_to_all", axis),
    ]
    assert {name: count for name, count in reader.read().counts.items() if count} == {axis: 5}
    assert spent(comm) == {part: 20.0}


@pytest.mark.parametrize(
    ("noting", "parts"),
    [("links", {"pipeline_communication": 1.0, "bubble": 3.0}), ("process_groups", {"bubble": 4.0})],
    indirect=["noting"],
)
def test_receive_over_links_splits_bubble_from_transfer_and_process_groups_do_not(noting, parts):
    comm, reader = noting
    comm.send(1, torch.zeros(1))
    comm.receive(1, torch.zeros(1)).wait()
    assert comm._backend.asked == [("send", 1), ("receive", 1)]
    assert {name: count for name, count in reader.read().counts.items() if count} == {"sent": 1, "received": 1}
    assert spent(comm) == parts


def test_own_time_of_a_rank_is_known_over_links_only():
    by_backend = {kind: Comm(RankGrid(ParallelConfig()), 0, CPU, kind) for kind in ("links", "process_groups")}
    for comm in by_backend.values():
        comm.step.begin(1)
    assert by_backend["links"].own_seconds > 0.0
    assert by_backend["process_groups"].own_seconds == 0.0


def test_progress_record_says_which_generation_connects_and_that_a_rank_rests(tmp_path):
    comm = Comm(RankGrid(ParallelConfig()), 0, CPU, progress=Progress.shared(tmp_path, 0))
    reader = ProgressReader(progress_path(tmp_path, 0))
    seen = []

    def address_facing(host: str) -> str:
        seen.append((reader.read().generation, reader.read().phase))
        return HOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manta.workers.comm.comm.address_facing", address_facing)
        comm.connect(dist.HashStore(), 4, HOST, SECRET)
    comm.close()
    seen.append((reader.read().generation, reader.read().phase))
    assert seen == [(4, "connecting"), (4, "resting")]
    reader.close()


def test_late_end_of_an_older_generation_does_not_reopen_a_closed_one():
    comm = Comm(RankGrid(ParallelConfig()), 0, CPU)
    comm.connect(dist.HashStore(), 3, HOST, SECRET)
    comm.end(1)
    comm.raise_if_over()
    comm.close()
    comm.end(2)  # an order that comes late
    with pytest.raises(PeerLost, match="generation 3 is over"):
        comm.raise_if_over()


def test_a_generation_that_ended_while_the_ranks_met_is_not_begun(monkeypatch):
    comm = Comm(RankGrid(ParallelConfig()), 0, CPU)

    class Ending(SharedWork):
        def __init__(self, *arguments):
            comm.end(1)
            super().__init__(*arguments)

    monkeypatch.setattr("manta.workers.comm.comm.SharedWork", Ending)
    with pytest.raises(PeerLost, match="generation 1 is over"):
        comm.connect(dist.HashStore(), 1, HOST, SECRET)


def two_ranks(body, generation: int = 1):
    """`body(comm)` on two tensor ranks that have both met; neither leaves before both are done."""
    store, grid, done = dist.HashStore(), RankGrid(ParallelConfig(tensor=2)), threading.Barrier(2)

    def run(rank: int):
        comm = Comm(grid, rank, CPU)
        comm.connect(store, generation, HOST, SECRET)
        done.wait(20)
        try:
            return body(comm)
        finally:
            done.wait(20)
            comm.close()

    results = run_threads(2, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def everything_breaks(comm: Comm) -> None:
    """Neither the training nor what is beside it gets through any more."""
    with pytest.raises(PeerLost):
        comm.all_reduce("tensor", torch.ones(1))
    with pytest.raises(PeerLost):
        comm.shared_work.together(lambda: 0, lambda parts: parts, (int, int))


@pytest.mark.parametrize(
    "abort",
    [lambda comm: comm.break_connections(), lambda comm: comm.end(1), lambda comm: comm.end(5)],
    ids=["break", "end", "end of a later one"],
)
def test_broken_or_ended_generation_breaks_all_connections_at_both_ends(abort):
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            abort(comm)
        everything_breaks(comm)

    two_ranks(body)


def test_collective_after_leaving_a_generation_is_refused():
    def body(comm: Comm) -> None:
        comm.close()
        with pytest.raises(PeerLost, match="or has left it"):
            comm.all_reduce("tensor", torch.ones(1))
        with pytest.raises(PeerLost, match="generation 1 is over"):
            comm.raise_if_over()

    two_ranks(body)


def test_gpu_sharing_ranks_communicate_through_host_memory_only_if_told_to():
    cuda, grid = torch.device("cuda"), RankGrid(ParallelConfig())
    assert Comm(grid, 0, cuda)._kind == "process_groups"
    assert Comm(grid, 0, CPU)._kind == "links"
    shared = Comm(grid, 0, cuda, "links")
    shared.connect(dist.HashStore(), 1, HOST, SECRET)
    assert isinstance(shared._backend, HostStaged)
    shared.close()


def test_host_staged_backend_passes_interrupt_confirm_and_close_on():
    called = []
    names = ("interrupt", "confirm", "close")
    staged = HostStaged(SimpleNamespace(**{name: partial(called.append, name) for name in names}))
    staged.interrupt()
    staged.confirm()
    staged.close()
    assert called == ["interrupt", "confirm", "close"]
