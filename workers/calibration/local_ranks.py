"""Runs all ranks of a job as processes of this machine, without Ray and without the service."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from workers.comm.comm import BackendKind, Comm
from workers.comm.grid import RankGrid
from workers.comm.host_names import ask_for_none
from workers.comm.lost_peers import in_short
from workers.comm.secret import SECRET_LENGTH
from workers.errors import MantaError, PeerLost
from workers.node.host import visible
from workers.spec.reading import parse_job_spec
from workers.system import gpu
from workers.threads import threads_of

Program = Callable[..., Any]
"""Runs on one rank: takes its Comm, the JobSpec and what else it was given; returns what can be pickled."""

HOST = "127.0.0.1"
SECONDS = 300.0


class RanksFailed(MantaError):
    """A rank died, raised or hung; the message says which, and why."""


@dataclass(frozen=True)
class Place:
    """What a rank computes on, and communicates over."""

    device: str = "cpu"
    backend: BackendKind = "links"
    visible_gpu: str | None = None
    """The only GPU that its process sees, as CUDA_VISIBLE_DEVICES takes it; None: whatever this process sees."""


ON_CPU = Place()


@dataclass(frozen=True)
class _Failed:
    """What a rank raised."""

    why: str
    by_others: bool
    """Whether another rank is gone, which says why itself."""


class LocalRanks:
    """Starts ranks from a warm process, one gang at a time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "workers.trainer"])
        ask_for_none()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._generation = 0

    def run(
        self,
        program: Program,
        document: dict[str, Any],
        *arguments: Any,
        seconds: float = SECONDS,
        places: Sequence[Place] = (ON_CPU,),
    ) -> list[Any]:
        """Run `program` on every rank of a job's layout: results by rank. `places`: of each, or one for all. Raises
        RanksFailed, also when that takes more than `seconds`."""
        self._generation += 1
        world = parse_job_spec(document).layout.world_size
        secret, ranks = secrets.token_hex(SECRET_LENGTH // 2), []
        try:
            for rank in range(world):
                ours, theirs = self._context.Pipe(duplex=False)
                where = (rank, self._store.port, self._generation, secret, places[rank % len(places)])
                target = self._context.Process(
                    target=_run_rank, args=(theirs, where, program, document, arguments), daemon=True
                )
                target.start()
                theirs.close()
                ranks.append((target, ours))
            return _collect(ranks, seconds)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _collect(ranks: Sequence[tuple[BaseProcess, Connection]], seconds: float) -> list[Any]:
    """The results of all ranks. Raises RanksFailed; where one says that another is gone, what that one says."""
    deadline, results = time.monotonic() + seconds, dict[int, Any]()
    while len(results) < len(ranks):
        missing = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in results}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, missing.values()))
            raise RanksFailed(f"after {seconds:.0f} s there was nothing from {_named(late, len(missing))}")
        for connection, rank in missing.items():
            if connection in ready:
                results[rank] = result = _received(rank, *ranks[rank])
                if isinstance(result, _Failed) and not result.by_others:
                    raise RanksFailed(f"rank {rank}: {result.why}")
    for rank, result in sorted(results.items()):
        if isinstance(result, _Failed):
            raise RanksFailed(f"rank {rank}: {result.why}")
    return [results[rank] for rank in range(len(ranks))]


def _named(ranks: str, count: int) -> str:
    return f"rank {ranks}" if count == 1 else f"ranks {ranks}"


def _received(rank: int, process: BaseProcess, connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        process.join(1.0)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
        raise RanksFailed(f"the process of rank {rank} {how} before it had a result") from error


def _run_rank(
    connection: Connection,
    where: tuple[int, int, int, str, Place],
    program: Program,
    document: dict[str, Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=end_with_reader, args=(connection,), daemon=True).start()
    os.dup2(2, 1)  # what libraries print there is nobody's result
    spec = parse_job_spec(document)
    torch.set_num_threads(threads_of(spec))
    try:
        comm = _joined(RankGrid(spec.layout), *where)
        connection.send(program(comm, spec, *arguments))
    except Exception as error:
        why = str(error) if isinstance(error, MantaError) else f"{type(error).__name__}: {in_short(error)}"
        connection.send(_Failed(why, isinstance(error, PeerLost)))
        raise
    comm.close()


def end_with_reader(connection: Connection) -> None:
    """End this process once nobody can read any more what is sent into `connection`: whoever started it is gone. The
    death of its parent says nothing of that: the server that forked it lives as long as it does."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # an error is told all the same
    poll.poll()
    os._exit(1)


def _joined(grid: RankGrid, rank: int, port: int, generation: int, secret: str, place: Place) -> Comm:
    """A rank that has met the others."""
    if place.visible_gpu is not None:  # before anything here asks CUDA for something
        os.environ.update(visible([place.visible_gpu]))
    device = torch.device(place.device)
    gpu.use(device)
    ask_for_none()
    comm = Comm(grid, rank, device, place.backend)
    if grid.world_size > 1:
        comm.connect(dist.TCPStore(HOST, port, is_master=False), generation, HOST, secret)
    return comm
