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

from manta.workers.comm.comm import BackendKind, Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.host_names import skip_reverse_lookups
from manta.workers.comm.lost_peers import short_message
from manta.workers.comm.secret import SECRET_LENGTH
from manta.workers.errors import MantaError, PeerLost
from manta.workers.node.host import visible
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu
from manta.workers.system.sockets import loopback_address
from manta.workers.system.threads import threads_of

Program = Callable[..., Any]
"""Runs on one rank: takes its Comm, the JobSpec and further arguments, and returns something that can be pickled."""

SECONDS = 300.0
END_SECONDS = 10.0
"""Seconds that a process whose connection is closed may take to end, which says how it did."""


class RanksFailed(MantaError):
    """A rank died, raised or hung; the message says which, and why."""


@dataclass(frozen=True)
class RankDevice:
    """The device that a rank computes on, and the backend it communicates over."""

    device: str = "cpu"
    backend: BackendKind = "links"
    visible_gpu: str | None = None
    """The only GPU that its process sees, as for CUDA_VISIBLE_DEVICES; None: the same ones as this process."""


ON_CPU = RankDevice()


@dataclass(frozen=True)
class _Failed:
    why: str
    caused_by_peer: bool
    """Whether the cause is the loss of another rank, which reports its own error."""


class LocalRanks:
    """Starts ranks by forking a process that has the imports done, one gang at a time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "manta.workers.trainer"])
        skip_reverse_lookups()
        self._store = dist.TCPStore(loopback_address(), 0, is_master=True, wait_for_workers=False)
        self._generation = 0

    def run(
        self,
        program: Program,
        document: dict[str, Any],
        *arguments: Any,
        seconds: float = SECONDS,
        devices: Sequence[RankDevice] = (ON_CPU,),
    ) -> list[Any]:
        """Run `program` on every rank of a job's layout and return the results by rank. `devices`: one per rank, or one
        for all. Raises RanksFailed, also after `seconds` without a result."""
        self._generation += 1
        world = parse_job_spec(document).layout.world_size
        secret, ranks = secrets.token_hex(SECRET_LENGTH // 2), []
        try:
            for rank in range(world):
                ours, theirs = self._context.Pipe(duplex=False)
                where = (rank, self._store.port, self._generation, secret, devices[rank % len(devices)])
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
    """The results of all ranks. Raises RanksFailed; if a rank lost another one, with the error of the other one."""
    deadline, results = time.monotonic() + seconds, dict[int, Any]()
    while len(results) < len(ranks):
        missing = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in results}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, missing.values()))
            named = f"rank {late}" if len(missing) == 1 else f"ranks {late}"
            raise RanksFailed(f"after {seconds:.0f} s there was nothing from {named}")
        for connection, rank in missing.items():
            if connection in ready:
                results[rank] = result = _received(rank, *ranks[rank])
                if isinstance(result, _Failed) and not result.caused_by_peer:
                    raise RanksFailed(f"rank {rank}: {result.why}")
    for rank, result in sorted(results.items()):
        if isinstance(result, _Failed):
            raise RanksFailed(f"rank {rank}: {result.why}")
    return [results[rank] for rank in range(len(ranks))]


def _received(rank: int, process: BaseProcess, connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        process.join(END_SECONDS)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
        raise RanksFailed(f"the process of rank {rank} {how} before it had a result") from error


def _run_rank(
    connection: Connection,
    where: tuple[int, int, int, str, RankDevice],
    program: Program,
    document: dict[str, Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=end_with_reader, args=(connection,), daemon=True).start()
    os.dup2(2, 1)  # what libraries print must not mix with results
    spec = parse_job_spec(document)
    torch.set_num_threads(threads_of(spec))
    try:
        comm = _joined(RankGrid(spec.layout), *where)
        connection.send(program(comm, spec, *arguments))
    except Exception as error:
        why = str(error) if isinstance(error, MantaError) else f"{type(error).__name__}: {short_message(error)}"
        connection.send(_Failed(why, isinstance(error, PeerLost)))
        raise
    comm.close()


def end_with_reader(connection: Connection) -> None:
    """End this process when nobody can read from `connection` any more, since whoever started it is gone. The end of
    its parent does not show that: the server that forked it lives as long as this process does."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # errors are reported in any case
    poll.poll()
    os._exit(1)


def _joined(grid: RankGrid, rank: int, port: int, generation: int, secret: str, place: RankDevice) -> Comm:
    """A Comm that has connected to the other ranks."""
    if place.visible_gpu is not None:  # before anything here uses CUDA
        os.environ.update(visible([place.visible_gpu]))
    device = torch.device(place.device)
    gpu.use(device)
    skip_reverse_lookups()
    comm = Comm(grid, rank, device, place.backend)
    if grid.world_size > 1:
        host = loopback_address()
        comm.connect(dist.TCPStore(host, port, is_master=False), generation, host, secret)
    return comm
