"""How many threads a rank computes with (decision 0021). Pure Python.

Sums over a tensor are cut among threads, so bits depend on their number. It is therefore decided when a job first
starts, and kept with the job: in the control plane's database, and in the JobSpec that each checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manta.workers.config import JobSpec

BEFORE = 1
"""Threads of jobs that began under a release without this choice."""
OF_COMPUTATION = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "GOMP_SPINCOUNT": "1000",
}
"""Environment of the zygote and of processes forked from it, which OpenMP reads when torch is loaded. One thread until
a child says otherwise, since a pool of threads would not survive the fork, and then exactly that number, whatever the
load. A waiting thread spins up to 1,000 times before it sleeps: libgomp's own 300,000 keep the cores from processes
that have work, and next to one other busy process a step took seven times as long or more."""


def decided_threads(spec: JobSpec, nodes: Iterable[tuple[int, int]]) -> int:
    """The number for a job that starts for the first time: from its spec; for auto, as many as leave each rank cores of
    its own. `nodes`: for each node with ranks on its CPU, its cores and the most ranks that the job may have there. 1
    if there are none, and if the number of replicas must not change any bit: another job, with other replicas, must get
    the same number."""
    threads = spec.resources.threads
    if threads != "auto":
        return threads
    if spec.train.deterministic == "elastic":
        return 1
    return max(1, min((cores // ranks for cores, ranks in nodes), default=1))


def with_threads(spec: JobSpec, threads: int) -> JobSpec:
    """`spec` of a job whose number of threads is decided."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"threads": threads})})


def threads_of(spec: JobSpec) -> int:
    """Threads of a rank with this spec. If nothing was decided that is one, since the spec was written without this
    choice in mind."""
    threads = spec.resources.threads
    return BEFORE if threads == "auto" else threads


def stored_threads(document: Mapping[str, Any]) -> int:
    """Threads of a job whose spec was stored as `document` after it had begun."""
    resources = document.get("resources")
    threads = resources.get("threads", BEFORE) if isinstance(resources, Mapping) else BEFORE
    return threads if isinstance(threads, int) else BEFORE
