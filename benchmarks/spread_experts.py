"""Experts spread over two replicas on a CPU (`parallel.expert: 2`), by either exchange, compared with replicas that
each have all experts: the time of a step, and the memory of experts' weights and gradients on a rank.

Steps of all kinds are taken in turns, and the median step counts.
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
from manta.workers.data.batch_plan import most_samples
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine

KINDS: dict[str, dict[str, Any]] = {
    "each_has_all": {},
    "all_gather": {"expert": 2, "expert_dispatch": "all_gather"},
    "all_to_all": {"expert": 2, "expert_dispatch": "all_to_all"},
}
MOST_SECONDS, MOST_BYTES = 1.3, 0.5
"""The most that the ratios to replicas that have all experts should be."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("spread_experts", __doc__)
    options.add_argument("--steps", type=int, default=5, help="steps of each kind in a turn (default: 5)")
    options.add_argument("--turns", type=int, default=3, help="turns (default: 3)")
    options.add_argument("--length", type=int, default=256, help="tokens of a sample (default: 256)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Time the steps of every kind."""
    report, ranks = Report("spread_experts", options.seed), LocalRanks()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    elements: dict[str, int] = {}
    for _ in range(options.turns):
        for kind, layout in KINDS.items():
            by_rank = ranks.run(timed_steps, job(layout, options.length), options.steps, options.seed)
            elements[kind] = max(count for count, _ in by_rank)
            seconds[kind] += [max(step) for step in zip(*(taken for _, taken in by_rank), strict=True)]
    medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
    for kind, median in medians.items():
        report.add(f"{kind}_step", round(median, 4), "s")
    for kind in ("all_gather", "all_to_all"):
        report.add(f"{kind}_step_ratio", round(medians[kind] / medians["each_has_all"], 3), "ratio", MOST_SECONDS)
        report.add(f"{kind}_memory_ratio", elements[kind] / elements["each_has_all"], "ratio", MOST_BYTES)
    report.settings = {"job": job({}, options.length), "steps": options.steps, "turns": options.turns}
    report.samples = {kind: [round(each, 4) for each in taken] for kind, taken in seconds.items()}
    return report


def job(layout: dict[str, Any], length: int) -> dict[str, Any]:
    """A job of two samples a step for each of two replicas, whose experts are most of the model."""
    moe = {"experts": 8, "per_token": 2, "ffn_hidden_size": 512}
    shape = {"family": "llama", "layers": 2, "hidden_size": 256, "heads": 4, "sequence_length": length, "moe": moe}
    return {
        "model": shape,
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 2},
        "parallel": {"data": 2, **layout},
        "resources": {"threads": 1},
    }


def timed_steps(comm: Comm, spec: JobSpec, steps: int, seed: int) -> tuple[int, list[float]]:
    """Elements of experts' weights and gradients on this rank, and the time of each step after one that is not
    counted."""
    engine = Engine(spec, comm)
    engine.initialise(seed)
    length, replica = spec.model.sequence_length, comm.index("data")
    tokens = torch.randint(256, (length + 1, 4), generator=torch.Generator().manual_seed(seed))
    own = tokens[:, 2 * replica : 2 * replica + 2]
    (most,) = most_samples(range(4), spec, replica, 0)
    batch = [MicroBatch(range(2 * replica, 2 * replica + 2), own[:-1], own[1:], most_samples=most)]
    seconds = []
    for _ in range(1 + steps):
        comm.barrier()
        began = time.perf_counter()
        engine.step(batch, 4, 1e-3, 0)
        seconds.append(time.perf_counter() - began)
    experts = [slot for slot in engine.flat.slots if slot.entry.shard.of_expert]
    return sum(2 * (slot.end - slot.start) for slot in experts), seconds[1:]


if __name__ == "__main__":
    sys.exit(main())
