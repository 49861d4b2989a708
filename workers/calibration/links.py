"""Times of collectives between ranks of one node, by number of ranks and size of the tensor."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from workers.calibration.clock import Run
from workers.calibration.measurements import CollectiveTime
from workers.comm.comm import Comm
from workers.config import JobSpec

SIZES = (4096, 65536, 524288, 2097152)
"""Bytes of the whole tensor."""
ROUNDS, TIMES = 5, 15


def collective_times(comm: Comm, _: JobSpec) -> list[CollectiveTime]:
    """Program for ranks: the time that each collective of the tensor group adds when it runs between products.

    Collectives one after the other, without products, take about half as long: no rank waits for one that still
    computes, and connections and tensors stay in the caches.
    """
    ranks, times, work = comm.size("tensor"), [], _products(comm.device)
    for size in SIZES:
        whole = torch.ones(size // 4, device=comm.device)
        part = torch.ones(size // 4 // ranks, device=comm.device)
        gather = partial(comm.all_gather, "tensor", part, whole)
        times.append(CollectiveTime("all_gather", ranks, size, _added_seconds(comm, work, gather)))
        scatter = partial(comm.reduce_scatter, "tensor", whole)
        times.append(CollectiveTime("reduce_scatter", ranks, size, _added_seconds(comm, work, scatter)))
    return times


def _products(device: torch.device) -> Run:
    """About the work of a small layer between two collectives."""
    tokens, weight = (torch.randn(rows, 256, device=device) for rows in (128, 256))

    def run() -> None:
        for _ in range(2):
            torch.relu_(torch.mm(tokens, weight) + 1.0)

    return run


def _added_seconds(comm: Comm, work: Run, collective: Run) -> float:
    """Seconds that `collective` adds to `work`: the median over ROUNDS; not negative."""

    def both() -> None:
        work()
        collective()

    both()  # allocates memory
    added = [_seconds(comm, both) - _seconds(comm, work) for _ in range(ROUNDS)]
    return max(0.0, statistics.median(added))


def _seconds(comm: Comm, run: Run) -> float:
    """Mean seconds of a run, over TIMES runs on all ranks."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(TIMES):
        run()
    comm.barrier()
    return (time.perf_counter() - began) / TIMES
