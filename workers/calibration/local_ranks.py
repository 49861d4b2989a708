"""Runs all ranks of a job as processes of this machine, without Ray and without the service."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.comm.host_names import ask_for_none
from workers.comm.secret import SECRET_LENGTH
from workers.errors import MantaError
from workers.spec.reading import parse_job_spec
from workers.threads import threads_of

Program = Callable[..., Any]
"""Runs on one rank: takes its Comm, the JobSpec and what else it was given; returns what can be pickled."""

HOST = "127.0.0.1"
SECONDS = 300.0


class RanksFailed(MantaError):
    """A rank died or hung."""


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
        device: str = "cpu",
    ) -> list[Any]:
        """Run `program` on every rank of a job's layout: results by rank. All ranks share `device`. Raises RanksFailed
        when that takes more than `seconds`."""
        self._generation += 1
        world = parse_job_spec(document).layout.world_size
        processes, connections, secret = [], [], secrets.token_hex(SECRET_LENGTH // 2)
        for rank in range(world):
            ours, theirs = self._context.Pipe(duplex=False)
            place = (theirs, rank, self._store.port, self._generation, secret, device)
            target = self._context.Process(target=_run_rank, args=(*place, program, document, arguments), daemon=True)
            processes.append(target)
            target.start()
            theirs.close()
            connections.append(ours)
        try:
            return _collect(connections, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        missing = [connection for rank, connection in enumerate(connections) if rank not in results]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed("a gang of local ranks did not end in time")
        for rank, connection in enumerate(connections):
            if connection in ready:
                try:
                    results[rank] = connection.recv()
                except EOFError as error:
                    raise RanksFailed(f"rank {rank} ended without a result") from error
    return [results[rank] for rank in range(len(connections))]


def _run_rank(
    connection: Connection,
    rank: int,
    port: int,
    generation: int,
    secret: str,
    device: str,
    program: Program,
    document: dict[str, Any],
    arguments: tuple[Any, ...],
) -> None:
    ask_for_none()
    spec = parse_job_spec(document)
    torch.set_num_threads(threads_of(spec))
    comm = Comm(RankGrid(spec.layout), rank, torch.device(device), "links")
    if spec.layout.world_size > 1:
        comm.connect(dist.TCPStore(HOST, port, is_master=False), generation, HOST, secret)
    connection.send(program(comm, spec, *arguments))
    comm.close()
