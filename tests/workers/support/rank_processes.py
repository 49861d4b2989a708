"""Eight processes that take turns at being the ranks of small layouts, so that torch is imported once for all tests.

`RankProcesses.run` gives every rank of a layout a `Comm` of a generation of its own, once all are connected, and a
program (a function of a module that the processes can import), and returns what each rank returned. A run that does not
end is killed, and the failure says where each rank stood.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from manta.workers.comm.comm import BackendKind, Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.host_names import skip_reverse_lookups
from manta.workers.comm.secret import SECRET_LENGTH
from manta.workers.config import ParallelConfig
from manta.workers.errors import PeerLost
from manta.workers.liveness.stacks import answer_with_stacks, capture_stacks, stacks_path
from manta.workers.system.threads import OF_COMPUTATION
from manta.workers.zygote.server import FIRST_USES

RANKS = 8
HOST = "127.0.0.1"
SECRET = "5" * SECRET_LENGTH


def join_default_group(comm: Comm, port: int) -> None:
    """Make the ranks of `comm` torch.distributed's default group, over gloo, until the program ends. `port`: of
    the store."""
    store = dist.PrefixStore(f"default-group-{comm.generation}", dist.TCPStore(HOST, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size("world"))


def meet(store: dist.Store, rank: int, world: int) -> None:
    """Wait until all of `world` ranks are here: one that leaves its generation before another one has connected is a
    lost peer to that."""
    store.set(str(rank), "")
    store.wait([str(each) for each in range(world)])


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def begin_process(body: Callable[..., Any], *arguments: Any) -> Any:
    """A process that runs `body`, a function of a module that it can import, and has imported torch already. It ends
    with this one at the latest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "manta.workers.trainer", *FIRST_USES])
    process = context.Process(target=body, args=arguments, daemon=True)
    with mock.patch.dict(os.environ, OF_COMPUTATION):  # for the server that forks them, which loads torch
        process.start()
    return process


class _Pickler(pickle.Pickler):
    """Of plain tensors it takes the numbers alone: their own pickles, an archive each, take ten times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or not value.numel():
            return NotImplemented
        numbers = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_of, (numbers, value.dtype, value.shape)


def _tensor_of(numbers: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


def pickled(value: Any) -> bytes:
    """For the way between processes."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class RankProcesses:
    """The processes and the rendezvous store that they meet through."""

    def __init__(self) -> None:
        skip_reverse_lookups()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._generation = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []

    @property
    def port(self) -> int:
        """Of the rendezvous store."""
        return self._store.port

    def run(
        self,
        layout: ParallelConfig,
        program: Callable[..., Any],
        *arguments: Any,
        backend: BackendKind | None = None,
        seconds: float = 90.0,
    ) -> list:
        """`program(comm, *arguments)` on every rank of `layout`: results by rank. Raises RankFailure."""
        self._start()
        self._generation += 1
        world = layout.world_size
        work = pickled((layout, self._store.port, self._generation, program, arguments, backend))
        for rank in range(world):
            self._connections[rank].send_bytes(pickle.dumps((rank, work)))
        outcomes = self._collect(world, time.monotonic() + seconds)
        culprits = [text for kind, text in outcomes if kind == "failed"]
        culprits += [text for kind, text in outcomes if kind == "lost its peer"]
        if culprits:
            raise RankFailure(culprits[0])
        return [value for _, value in outcomes]

    def _start(self) -> None:
        while len(self._processes) < RANKS:
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(begin_process(_serve, theirs, self._folder.name, len(self._processes)))
            theirs.close()
            self._connections.append(ours)

    def _collect(self, world: int, deadline: float) -> list[tuple[str, Any]]:
        outcomes: dict[int, tuple[str, Any]] = {}
        while len(outcomes) < world:
            waiting = [self._connections[rank] for rank in range(world) if rank not in outcomes]
            ready = self._ready(waiting, deadline)
            if not ready:
                self._fail(f"ranks {sorted(set(range(world)) - set(outcomes))} did not end", outcomes)
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self._fail(f"the process of rank {rank} died", outcomes)
        return [outcomes[rank] for rank in range(world)]

    def _ready(self, waiting: list[Any], deadline: float) -> list[Any]:
        """Which of these ranks have ended; none at the deadline."""
        return multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))

    def _fail(self, reason: str, outcomes: dict[int, tuple[str, Any]]) -> None:
        """Ask every rank where it stands, kill all, and raise."""
        texts = [str(text) for kind, text in outcomes.values() if kind != "returned"]
        for rank in set(range(len(self._processes))) - set(outcomes):
            stacks = asyncio.run(capture_stacks(self._processes[rank].pid, stacks_path(self._folder.name, rank)))
            texts.append(f"rank {rank} stood at:\n{stacks[-3000:]}")
        self.close()
        raise RankFailure("\n".join([reason, *texts]))

    def close(self) -> None:
        """End all processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()


def _serve(connection: multiprocessing.connection.Connection, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    skip_reverse_lookups()
    answer_with_stacks(folder, rank)
    while True:
        try:
            order = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickled(_outcome(order)))


def _outcome(order: bytes) -> tuple[str, Any]:
    comm: Comm | None = None
    try:
        rank, work = pickle.loads(order)
        layout, port, generation, program, arguments, backend = pickle.loads(work)
        comm = Comm(RankGrid(layout), rank, torch.device("cpu"), backend, in_place=True)
        if layout.world_size > 1:
            store = dist.TCPStore(HOST, port, is_master=False)
            comm.connect(store, generation, HOST, SECRET)
            meet(dist.PrefixStore(f"met-{generation}", store), rank, layout.world_size)
        return "returned", program(comm, *arguments)
    except PeerLost:
        return "lost its peer", traceback.format_exc()
    except BaseException:  # noqa: BLE001 - whatever it is, the test shall see it
        return "failed", traceback.format_exc()
    finally:
        if comm is not None:
            comm.close()
            comm.forget()
        if dist.is_initialized():  # the program's own
            dist.destroy_process_group()
