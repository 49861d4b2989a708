"""Plans that other automatic systems have published, compared with what the search finds for the same model, batch and
cluster: which of them our space contains, and what lacking the others costs at most. Nothing is run; times are the
planner's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.support.report import Report, deliver, parser
from service.planner.hardware import Cluster, machine_of
from service.planner.memory import fits
from service.planner.search import Plan, plan_of, search
from service.planner.software import engine_on
from service.planner.stage_shares import in_words
from workers.config import JobSpec
from workers.spec.rules import find_problems

Layout = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and the plan that was found for it."""

    name: str
    shape: tuple[int, int, int, int, int]
    """Sequence, hidden, layers, heads, vocabulary."""
    batch: int
    gpus: int
    layout: Layout | None
    """The plan in our words; None: our space does not contain it."""
    micro_batch: int = 1
    """Sequences of a replica."""


ALPA = (
    Case("alpa_350m", (1024, 1024, 24, 16, 51200), 1024, 1, {}, 2),
    Case("alpa_760m", (1024, 1536, 24, 16, 51200), 1024, 2, {"pipeline": 2}, 8),
    Case("alpa_1.3b", (1024, 2048, 24, 32, 51200), 1024, 4, {"pipeline": 2, "data": 2}, 4),
    Case("alpa_2.6b", (1024, 2560, 32, 32, 51200), 1024, 8, None),
    Case("alpa_6.7b", (1024, 4096, 32, 32, 51200), 1024, 16, {"tensor": 4, "pipeline": 2, "data": 2}, 8),
    Case("alpa_15b", (1024, 5120, 48, 40, 51200), 1024, 32, {"tensor": 4, "pipeline": 4, "data": 2}, 4),
    Case("alpa_39b", (1024, 8192, 48, 64, 51200), 1024, 64, {"tensor": 4, "pipeline": 16}, 1),
)
"""Solutions for AWS p3.16xlarge in Alpa's own repository (github.com/alpa-projects/alpa, commit 14ad84b,
benchmark/alpa/suite_auto_gpt.py), shapes from suite_manual_gpt.py next to it. All recompute every layer. That of 2.6
billion has two stages of 2 GPUs with a quarter of the layers each, and one of 4 GPUs with half of them."""
NNSCALER = Case("nnscaler_t5", (1024, 6144, 32, 96, 2_048_000), 256, 32, None)
"""The shape of nnScaler's T5 with its vocabulary of two million, as a decoder: its interlaced pipeline splits the
embedding over all GPUs (arXiv:2301.08984; shape from the branch osdi24ae of github.com/microsoft/nnscaler)."""
SMALL_VOCABULARY = 51200


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return deliver(measure, parser("automatic_plans", __doc__).parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Search all cases."""
    report = Report("automatic_plans", options.seed)
    rows = []
    for case in ALPA:
        cluster = p3_cluster(case.gpus)
        best = best_plan(job_of(case), cluster)
        row = {"case": case.name, "best": words(best.spec), "best_seconds": best.time.seconds}
        report.add(f"{case.name}_best_seconds", round(best.time.seconds, 3), "s")
        if case.layout is not None:
            theirs = job_of(case, case.layout, case.micro_batch)
            plan = plan_of(theirs, cluster, engine_on(cluster.machine))
            row |= {"theirs": words(theirs), "their_seconds": plan.time.seconds, "fits": fits(theirs, cluster).fits}
            report.add(f"{case.name}_theirs_to_best", round(plan.time.seconds / best.time.seconds, 3), "ratio")
            axes = min(
                plan_of(each, cluster, engine_on(cluster.machine)).time.seconds
                for each in _in_their_axes(case, cluster)
            )
            row |= {"their_axes_seconds": axes}
            report.add(f"{case.name}_their_axes_to_best", round(axes / best.time.seconds, 3), "ratio")
        else:
            row |= {"ideal_seconds": ideal_seconds(best)}
            cost = best.time.seconds / ideal_seconds(best) - 1
            report.add(f"{case.name}_costs_at_most", round(cost, 3), "ratio")
        rows.append(row)
    rows.append(_split_embedding(report))
    report.samples = {"cases": rows}
    return report


def p3_cluster(gpus: int) -> Cluster:
    """AWS p3.16xlarge: eight V100 of 16 GB, and 25 Gbit/s between nodes."""
    machine = replace(machine_of("v100-16gb"), adapters=1, adapter_bandwidth=25e9 / 8)
    return Cluster(machine, max(1, gpus // 8), min(gpus, 8))


def job_of(case: Case, layout: Layout | None = None, micro_batch: int | None = None) -> JobSpec:
    """The job, with a layout that recomputes every layer, or with one to be found."""
    sequence, hidden, layers, heads, vocabulary = case.shape
    model = {"layers": layers, "hidden_size": hidden, "heads": heads, "sequence_length": sequence}
    train = {"steps": 1, "global_batch_size": case.batch, "precision": "fp16"}
    document = {
        "model": model | {"vocabulary_size": vocabulary},
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": train if micro_batch is None else train | {"micro_batch_size": micro_batch},
        "parallel": "auto" if layout is None else {"recompute": "full", **layout},
    }
    return JobSpec.model_validate(document)


def _in_their_axes(case: Case, cluster: Cluster) -> Iterator[JobSpec]:
    """What fits with their tensor, pipeline and data sizes, whatever is recomputed, in which order and how finely."""
    axes = case.layout or {}
    orders: list[Layout] = [{}]
    if axes.get("pipeline", 1) > 1:
        orders += [{"schedule": "zb-h1"}, {"schedule": "zb-v", "virtual_stages": 2}]
    for order, recompute, size in product(orders, ("none", "selective", "full"), (1, 2, 4, 8, 16)):
        spec = job_of(case, {**axes, **order, "recompute": recompute}, size)
        if not find_problems(spec) and fits(spec, cluster).fits:
            yield spec


def best_plan(job: JobSpec, cluster: Cluster) -> Plan:
    """The fastest of those that fit."""
    return search(job, cluster, engine_on(cluster.machine), limit=1).plans[0]


def words(spec: JobSpec) -> str:
    """A layout in short: tensor x pipeline x data, and what else there is to say."""
    layout = spec.layout
    chunks = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    chunks += f", layers {in_words(layout.stage_layers)}" if layout.stage_layers else ""
    return (
        f"{layout.tensor}x{layout.pipeline}x{layout.data} {layout.schedule}{chunks}, micro-batch "
        f"{spec.train.micro_batch_size}, recompute {layout.recompute}"
    )


def ideal_seconds(plan: Plan) -> float:
    """The same step without its bubble, its reductions and its slowest replica: less than any cut into stages takes
    whose operations are no faster."""
    return plan.time.work


def _split_embedding(report: Report) -> dict[str, Any]:
    """What it costs that the embedding lies on the ends of the pipeline: against the same model with a common
    vocabulary, and the rest of the vocabulary's products split over all GPUs."""
    cluster = Cluster(machine_of("v100-32gb"), 2, 16)
    answer = search(job_of(NNSCALER), cluster, engine_on(cluster.machine), limit=1)
    row: dict[str, Any] = {"case": NNSCALER.name}
    sequence, hidden, layers, heads, vocabulary = NNSCALER.shape
    small = replace(NNSCALER, shape=(sequence, hidden, layers, heads, SMALL_VOCABULARY))
    other = best_plan(job_of(small), cluster)
    flops = 6 * NNSCALER.batch * sequence * hidden * (vocabulary - SMALL_VOCABULARY)
    rate = cluster.machine.accelerator.peak_16bit * cluster.machine.constants.product * NNSCALER.gpus
    split = other.time.seconds + flops / rate
    row |= {"split_seconds": split, "without": words(other.spec)}
    report.add("nnscaler_t5_fits", bool(answer.plans), "bool")
    if answer.plans:
        best = answer.plans[0]
        row |= {"best": words(best.spec), "best_seconds": best.time.seconds}
        report.add("nnscaler_t5_costs", round(best.time.seconds / split - 1, 3), "ratio")
    else:
        row |= {"rejected": answer.rejected[0].reason}
    return row


if __name__ == "__main__":
    sys.exit(main())
