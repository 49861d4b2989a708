"""Steps of a job with a large vocabulary on two pipeline stages, under every list of layers (`parallel.stage_layers`):
as the planner predicts them after a calibration of this machine, and as the engine takes them.

All predictions are made before the first step. The two ranks, with one thread each, hold the job under all lists, which
take turns step by step; a list's time is the median of its steps but the first ones. Each rank needs a core that
nothing else uses: the gain is that none of the two waits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from benchmarks.planned_layouts import SLOTS
from benchmarks.support.calibrated import add_options, calibration, core_of
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from service.planner.hardware import Cluster, cpu_machine
from service.planner.search import search
from service.planner.software import engine_on
from service.planner.step_time import StepModel
from workers.calibration.steps import random_batch
from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.engine import Engine
from workers.parallel.pipeline.stages import even_counts, layer_counts
from workers.spec.reading import parse_job_spec
from workers.system.cores import usable_cores
from workers.threads import with_threads

Timed = tuple[list[float], list[float]]
"""Seconds and losses of steps."""
WARM_UP = 2
MODEL = {"layers": 8, "hidden_size": 256, "heads": 4, "sequence_length": 64, "vocabulary_size": 12_000}
TRAIN = {"global_batch_size": 16, "micro_batch_size": 2}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("uneven_stages", __doc__)
    options.add_argument("--steps", type=int, default=20, help="steps of each list (default: 20)")
    options.add_argument("--schedule", choices=("1f1b", "zb-h1"), default="1f1b", help="(default: 1f1b)")
    add_options(options)
    return deliver(lambda chosen: measure(chosen, MODEL), options.parse_args(arguments))


def measure(options: argparse.Namespace, model: dict[str, Any]) -> Report:
    """Predict all lists, then time them in turns."""
    report, ranks = Report("uneven_stages", options.seed), LocalRanks()
    core = core_of(calibration(options.machine))
    cluster = Cluster(cpu_machine(SLOTS, usable_cores(), 1e12, core), 1, SLOTS)
    layers = int(model["layers"])
    lists: list[tuple[int, ...]] = [(first, layers - first) for first in range(layers // 2, layers)]
    specs = {counts: parse_job_spec(job(options, model, counts)) for counts in lists}
    predicted = {counts: _seconds(spec, cluster) for counts, spec in specs.items()}
    chosen = _chosen(specs[lists[0]], cluster)
    documents = [job(options, model, counts) for counts in lists]
    rank = ranks.run(taking_turns, documents[0], documents, options.steps)[-1]  # which has the loss
    taken = {counts: seconds[WARM_UP:] for counts, (seconds, _) in zip(lists, rank, strict=True)}
    losses = [each for _, each in rank]
    least = {counts: min(seconds) for counts, seconds in taken.items()}
    median = {counts: statistics.median(seconds) for counts, seconds in taken.items()}
    for counts in lists:
        name = "_".join(map(str, counts))
        report.add(f"{name}_predicted", round(1e3 * predicted[counts], 1), "ms")
        report.add(f"{name}_step", round(1e3 * median[counts], 1), "ms")
        report.add(f"{name}_least", round(1e3 * least[counts], 1), "ms")
    even = even_counts(layers, 2)
    report.add("first_stage_of_chosen", chosen[0], "layers")
    report.add("first_stage_of_fastest", min(lists, key=lambda each: median[each])[0], "layers")
    report.add("even_to_chosen_predicted", round(predicted[even] / predicted[chosen], 3), "ratio")
    report.add("even_to_chosen", round(median[even] / median[chosen], 3), "ratio")
    report.add("even_to_chosen_least", round(least[even] / least[chosen], 3), "ratio")
    report.add("same_losses", all(each == losses[0] for each in losses), "bool", True)
    report.settings = {"job": job(options, model, chosen)}
    report.samples = {"_".join(map(str, counts)): seconds for counts, seconds in taken.items()}
    return report


def taking_turns(comm: Comm, first: JobSpec, documents: list[dict[str, Any]], steps: int) -> list[Timed]:
    """Program for ranks: the jobs of these documents, a step each at a time; what steps took, and their losses."""
    specs = [with_threads(parse_job_spec(document), 1) for document in documents]
    engines = [Engine(spec, comm) for spec in specs]
    batch = random_batch(first, comm.device)
    timed: list[Timed] = [([], []) for _ in specs]
    for engine, spec in zip(engines, specs, strict=True):
        engine.initialise(spec.train.seed)
    for _ in range(steps):
        for engine, (seconds, losses) in zip(engines, timed, strict=True):
            comm.barrier()
            began = time.perf_counter()
            statistics = engine.step(batch, TRAIN["global_batch_size"], 1e-4, 0)
            seconds.append(time.perf_counter() - began)
            losses.append(statistics.loss)
    return timed


def job(options: argparse.Namespace, model: dict[str, Any], counts: tuple[int, ...]) -> dict[str, Any]:
    """A job of two stages with so many layers."""
    return {
        "name": "uneven",
        "model": model,
        "data": {"source": "python-stdlib"},
        "train": {**TRAIN, "steps": options.steps, "seed": options.seed},
        "parallel": {"pipeline": 2, "schedule": options.schedule, "stage_layers": list(counts)},
        "checkpoint": {"every_steps": 0},
    }


def _seconds(spec: JobSpec, cluster: Cluster) -> float:
    return StepModel(with_threads(spec, 1), cluster, engine_on(cluster.machine)).time().seconds


def _chosen(spec: JobSpec, cluster: Cluster) -> tuple[int, ...]:
    """The list that a search finds for this layout."""
    auto = with_threads(spec.model_copy(update={"parallel": "auto"}), 1)
    plans = search(auto, cluster, engine_on(cluster.machine), limit=200, ranks=2).plans
    wanted = spec.layout.pipeline, spec.layout.schedule, "none"
    layouts = (plan.spec.layout for plan in plans)
    layout = next(each for each in layouts if (each.pipeline, each.schedule, each.recompute) == wanted)
    return layer_counts(spec.model.layers, layout)


if __name__ == "__main__":
    sys.exit(main())
