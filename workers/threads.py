"""How many threads a rank computes with (decision 0021). Pure Python.

Sums over a tensor are cut among threads, so bits depend on their number. It is therefore decided when a job first
starts, and kept with the job: in the control plane's database, and in the JobSpec that each checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workers.config import JobSpec

BEFORE = 1
"""Threads of all jobs that began under a release that did not let them be chosen."""
OF_COMPUTATION = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "GOMP_SPINCOUNT": "1000",
}
"""Environment of the zygote and of what is forked from it, which OpenMP reads when torch is loaded. One thread until a
child says otherwise, since a pool of threads would not survive the fork, and then that number whatever the load.
Threads that wait for others of their process look up to 1,000 times before they sleep: libgomp's own 300,000 keep the
cores from processes that have work, and next to one other busy process a step took seven times as long or more."""


def decided_threads(spec: JobSpec, nodes: Iterable[tuple[int, int]]) -> int:
    """The number for a job that starts for the first time: what its spec says; for auto so many that they leave each
    rank cores of its own. `nodes`: of each node with ranks on its CPU the cores, and the most ranks that the job may
    have there. 1 where there is none, and where the number of replicas is to change no bit: another job, with other
    replicas, has to decide alike."""
    said = spec.resources.threads
    if said != "auto":
        return said
    if spec.train.deterministic == "elastic":
        return 1
    return max(1, min((cores // ranks for cores, ranks in nodes), default=1))


def with_threads(spec: JobSpec, threads: int) -> JobSpec:
    """`spec` of a job for which the number is decided."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"threads": threads})})


def threads_of(spec: JobSpec) -> int:
    """What a rank with this spec computes with. Where nothing was decided that is one, as the author of the spec knows
    of no choice."""
    said = spec.resources.threads
    return BEFORE if said == "auto" else said


def stored_threads(document: Mapping[str, Any]) -> int:
    """What a job computes with whose spec was stored as `document` after it had begun."""
    resources = document.get("resources")
    said = resources.get("threads", BEFORE) if isinstance(resources, Mapping) else BEFORE
    return said if isinstance(said, int) else BEFORE
