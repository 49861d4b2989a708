"""Context parallelism on two CPU ranks: its orders and methods compared, and with one process, for a small Llama whose
time is mostly attention's.

Steps of all kinds are taken in turns, and the median step counts. Beside the time of a step, which depends on what else
the machine does, stands the processor time of the rank that uses most, which waits for nobody.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.spec.sequence_runs import runs_of

KINDS: dict[str, dict[str, Any]] = {
    "one_process": {},
    "zigzag": {"context": 2},
    "contiguous": {"context": 2, "context_order": "contiguous"},
    "ring": {"context": 2, "context_method": "ring"},
    "all_to_all": {"context": 2, "context_method": "all_to_all"},
}
"""Layouts; the first two ranks gather keys and values in zigzag order."""
RATIOS = {
    ("contiguous", "zigzag"): None,  # (2c - 1) / c = 1.5 of the attention
    ("zigzag", "one_process"): 0.65,
    ("ring", "zigzag"): 1.15,
    ("all_to_all", "zigzag"): None,
}
"""Pairs of kinds whose steps are compared, and the most that the ratio should be."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("context", __doc__)
    options.add_argument("--steps", type=int, default=3, help="steps of each kind in a turn (default: 3)")
    options.add_argument("--turns", type=int, default=3, help="turns (default: 3)")
    options.add_argument("--length", type=int, default=4096, help="tokens of a sample (default: 4096)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Time the steps of every kind."""
    report, ranks = Report("context", options.seed), LocalRanks()
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.turns):
        for kind, layout in KINDS.items():
            by_rank = ranks.run(timed_steps, job(layout, options.length), options.steps, options.seed)
            for step in zip(*by_rank, strict=True):
                seconds[kind].append((max(wall for wall, _ in step), max(busy for _, busy in step)))
    for number, what in enumerate(("step", "busiest_rank")):
        medians = {kind: statistics.median(each[number] for each in taken) for kind, taken in seconds.items()}
        for kind, median in medians.items():
            report.add(f"{kind}_{what}", round(median, 4), "s")
        for (kind, other), target in RATIOS.items():
            report.add(f"{kind}_to_{other}_{what}", round(medians[kind] / medians[other], 3), "ratio", target)
    report.settings = {"job": job({}, options.length), "steps": options.steps, "turns": options.turns}
    report.samples = {kind: [[round(each, 4) for each in step] for step in taken] for kind, taken in seconds.items()}
    return report


def job(layout: dict[str, Any], length: int) -> dict[str, Any]:
    """A job of one sample a step."""
    return {
        "model": {"family": "llama", "layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": length},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1, "global_batch_size": 1},
        "parallel": layout,
        "resources": {"threads": 1},
    }


def timed_steps(comm: Comm, spec: JobSpec, steps: int, seed: int) -> list[tuple[float, float]]:
    """Time and processor time of each step on this rank, after one that is not counted."""
    engine = Engine(spec, comm)
    engine.initialise(seed)
    length = spec.model.sequence_length
    tokens = torch.randint(256, (length + 1, 1), generator=torch.Generator().manual_seed(seed))
    batch = [MicroBatch(range(1), tokens[:-1], tokens[1:]).part(runs_of(spec.layout, length, comm.index("context")))]
    seconds = []
    for _ in range(1 + steps):
        comm.barrier()
        began, busy = time.perf_counter(), time.process_time()
        engine.step(batch, 1, 1e-3, 0)
        seconds.append((time.perf_counter() - began, time.process_time() - busy))
    return seconds[1:]


if __name__ == "__main__":
    sys.exit(main())
