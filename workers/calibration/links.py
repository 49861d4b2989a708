"""Collectives between ranks of one node, by their number and the size of the tensor."""

from __future__ import annotations

import time
from functools import partial

import torch

from workers.calibration.clock import Run
from workers.calibration.measurements import CollectiveTime
from workers.comm.comm import Comm
from workers.config import JobSpec

SIZES = (4096, 65536, 524288, 2097152)
"""Bytes of the whole tensor."""
TIMES = 60


def collective_times(comm: Comm, _: JobSpec) -> list[CollectiveTime]:
    """Program for ranks: what each collective of the tensor group takes."""
    ranks, times = comm.size("tensor"), []
    for size in SIZES:
        whole = torch.ones(size // 4, device=comm.device)
        part = torch.ones(size // 4 // ranks, device=comm.device)
        gather = partial(comm.all_gather, "tensor", part, whole)
        times.append(CollectiveTime("all_gather", ranks, size, _seconds(comm, gather)))
        scatter = partial(comm.reduce_scatter, "tensor", whole)
        times.append(CollectiveTime("reduce_scatter", ranks, size, _seconds(comm, scatter)))
    return times


def _seconds(comm: Comm, run: Run) -> float:
    """Least mean of some in a row: whatever else the machine does only makes it longer."""
    means = []
    for _ in range(7):
        comm.barrier()
        comm.settle()
        began = time.perf_counter()
        for _ in range(TIMES // 7):
            run()
        comm.settle()
        means.append((time.perf_counter() - began) / (TIMES // 7))
    return min(means)
