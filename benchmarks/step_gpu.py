"""The page that the owner of a GPU runs once: what this engine does there, compared with others, and which goals it
meets.

    python -m benchmarks.step_gpu            # writes step_gpu.json, step_gpu.txt and step_gpu-trace.json.gz

One training step in bf16 of GPTs of 125 million and 1.3 billion parameters, of a Llama of 1.5 billion, and of one as
wide as an 8 billion one with its layers cut to fit: tokens a second, MFU in both conventions, peak memory next to what
was predicted; compiled, not compiled, by kernels that give the same bits each time, with 8-bit products in the layers,
with the logits of a few tokens at a time, and with a third of the layers' activations in host memory; beside the same
model of `transformers` under torch.compile, of torchtitan and of Megatron Core where those are installed, and beside
the card's own rate of matrix products. How fast products and casts of 8 bits are, and how far losses then go from those
of bf16. What is saved by few logits and by host memory in a Llama of 1 billion with 128,256 token ids, and that it
computes the same. What CUDA graphs of micro-batches save, and that they compute the same. Two ranks on the one card,
whose messages travel through host memory: the numbers of one rank, and the same bits after one of them was killed. What
snapshots cost. Whether process groups can be repaired in place. A trace of two steps, for Perfetto or chrome://tracing.

Needs no more than torch, numpy, pydantic and PyYAML. A part that fails is named on the page, and the others go on.
`--device cpu` runs every line of it with tiny models, to try the program: those figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.support.gpu import contestants, two_ranks
from benchmarks.support.gpu.eight_bits import KINDS, measure_losses, measure_rates
from benchmarks.support.gpu.graphs import measure_graphs
from benchmarks.support.gpu.left_out import going_on
from benchmarks.support.gpu.memory_savers import measure_memory_savers
from benchmarks.support.gpu.page import CONTESTANTS, page_of
from benchmarks.support.gpu.sizes import CURVES, PAIRED, SIZES, WIDE_VOCABULARY, Size, tiny
from benchmarks.support.gpu.snapshot_cost import measure_snapshots
from benchmarks.support.report import Report, parser
from manta.workers.accounting.device_bytes import device_bytes
from manta.workers.accounting.device_peak import measure_peak_flops
from manta.workers.accounting.flops import parameter_count, step_flops
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.spec.reading import parse_job_spec

PARTS = ("models", "fp8_rates", "fp8_losses", "memory", "graphs", "pairs", "kill", "snapshots", "repair", "trace")
SNAPSHOT_SIZES = GRAPH_SIZES = ("gpt_125m", "llama_1b5")
TRACED = "llama_1b5"
EIGHT_BITS = {f"manta_fp8_{kind}": kind for kind in KINDS}
"""Contestants, by what they give train.fp8."""
HEAD_TOKENS = 2048
CONTEXT_BYTES = 2**30
"""More than a context takes of a GPU's memory."""


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for and write its three files; returns the exit status, 1 where there is no GPU."""
    options = parser("step_gpu", __doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    options.add_argument("--steps", type=int, default=10, help="timed steps of each model (default: 10)")
    options.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="default: all")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="of part models; default: all"
    )
    options.add_argument("--eager", action="store_true", help="compile nothing, which takes most of a rehearsal's time")
    options.set_defaults(out=Path("step_gpu.json"))
    given = options.parse_args(arguments)
    try:
        report = measure(given)
    except MantaError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report.to_json(), indent=1) if given.json else page_of(report))
    return 0


def _write(report: Report, out: Path) -> None:
    """What is known so far: a run that is cut off must not have been for nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".txt").write_text(page_of(report), encoding="utf-8")


def measure(options: argparse.Namespace) -> Report:
    """Run all parts. Raises MantaError where there is no GPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise MantaError("this benchmark needs a GPU and found none (--device cpu tries the program)")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    report = Report("step_gpu", options.seed)
    sizes = {name: _chosen(SIZES[name], device) for name in options.sizes}
    report.settings = {
        "sizes": {name: vars(size) for name, size in sizes.items()},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "rehearsal": device.type == "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "steps": options.steps,
        "compiled": not options.eager,
        "held_by_others": _held_by_others(device),
        "left_out": {},
    }
    parts: dict[str, Callable[[], object]] = {
        "models": lambda: _measure_models(report, sizes, options, device),
        "fp8_rates": lambda: measure_rates(report, device, not options.eager),
        "fp8_losses": lambda: measure_losses(report, _chosen(CURVES, device), options.seed, device),
        "memory": lambda: measure_memory_savers(report, _chosen(WIDE_VOCABULARY, device), options, device),
        "graphs": lambda: measure_graphs(
            report, {name: size for name, size in sizes.items() if name in GRAPH_SIZES}, options, device
        ),
        "pairs": lambda: two_ranks.measure_pairs(report, _chosen(PAIRED, device), options.seed, device),
        "kill": lambda: two_ranks.measure_kill(report, _chosen(PAIRED, device), options.seed, device),
        "snapshots": lambda: _measure_snapshots(report, sizes, options, device),
        "repair": lambda: two_ranks.measure_repair(report, device),
        "trace": lambda: _trace(report, options, device),
    }
    for name in options.parts:
        began = time.monotonic()
        with going_on(report, name):
            parts[name]()
        report.add(f"part_{name}", round(time.monotonic() - began, 1), "s")
        _write(report, options.out)
    return report


def _held_by_others(device: torch.device) -> int:
    """Bytes of the device's memory that are in use before anything begins, this process's context apart."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - CONTEXT_BYTES)


def _chosen(size: Size, device: torch.device) -> Size:
    return tiny(size) if device.type == "cpu" else size


def _measure_models(report: Report, sizes: dict[str, Size], options: argparse.Namespace, device: torch.device) -> None:
    peak, products = measure_peak_flops(str(device)), contestants.product_rate(device)
    report.add("peak", round(peak.peak_flops / 1e12, 3), "TFLOP/s")
    report.add("matrix_products", round(products / 1e12, 3), "TFLOP/s")
    for name, size in sizes.items():
        contest = _contestants(size, options)
        report.add(f"{name}_parameters", parameter_count(contest["manta"][1]), "parameters")
        for who in (each for each in options.contestants if each in contest):
            make, spec = contest[who]
            with going_on(report, f"{name}_{who}"):
                taken = contestants.timed(functools.partial(make, spec, device), options.steps, device)
                _add_step(report, f"{name}_{who}", spec, taken, peak.peak_flops, products)
                if make is contestants.manta:
                    report.add(f"{name}_{who}_memory_predicted", device_bytes(spec)[0].total, "bytes")
            _write(report, options.out)
        for ours, theirs in (*(("manta", who) for who in contestants.OTHERS), *((who, "manta") for who in EIGHT_BITS)):
            rates = [report.figures.get(f"{name}_{each}_tokens_per_second") for each in (ours, theirs)]
            if rates[0] is not None and rates[1] is not None:
                report.add(f"{name}_{ours}_to_{theirs}", round(rates[0].value / rates[1].value, 4), "ratio")


def _contestants(size: Size, options: argparse.Namespace) -> dict[str, tuple[contestants.Maker, JobSpec]]:
    """By name."""

    def job(compiled: bool = not options.eager, offload_layers: int = 0, **train: object) -> JobSpec:
        parallel = {"offload_layers": offload_layers}
        return parse_job_spec(size.document(options.seed, compiled, train=train, parallel=parallel))

    ours = {"manta": job(), "manta_eager": job(compiled=False), "manta_same_bits": job(deterministic_kernels=True)}
    if options.eager:
        ours.pop("manta_eager")
    ours |= {who: job(fp8=kind) for who, kind in EIGHT_BITS.items()}
    ours["manta_chunked_head"] = job(head_tokens=HEAD_TOKENS)
    ours["manta_offload"] = job(offload_layers=size.layers // 3)
    ours["manta_offload_state"] = job(optimizer={"offload": True})
    return {
        **{who: (contestants.manta, spec) for who, spec in ours.items()},
        **{who: (make, ours["manta"]) for who, make in contestants.OTHERS.items()},
    }


def _add_step(
    report: Report, prefix: str, spec: JobSpec, taken: tuple[float, int], peak: float, products: float
) -> None:
    seconds, memory = taken
    flops, tokens = step_flops(spec), spec.train.global_batch_size * spec.model.sequence_length
    report.add(f"{prefix}_step", round(1e3 * seconds, 2), "ms")
    report.add(f"{prefix}_tokens_per_second", round(tokens / seconds, 1), "tokens/s")
    report.add(f"{prefix}_mfu_full", round(flops.model_full / seconds / peak, 4), "ratio")
    report.add(f"{prefix}_mfu_causal", round(flops.model_causal / seconds / peak, 4), "ratio")
    report.add(f"{prefix}_of_matrix_products", round(flops.model_causal / seconds / products, 4), "ratio")
    report.add(f"{prefix}_peak_memory", memory, "bytes")


def _measure_snapshots(
    report: Report, sizes: dict[str, Size], options: argparse.Namespace, device: torch.device
) -> None:
    for name in SNAPSHOT_SIZES:
        if name in sizes:
            with going_on(report, f"snapshots_{name}"):
                measure_snapshots(report, name, sizes[name], options.seed, options.steps, device, not options.eager)


def _trace(report: Report, options: argparse.Namespace, device: torch.device) -> None:
    """Write what the device and the host did in two steps, in Chrome's format, beside the report."""
    spec = parse_job_spec(_chosen(SIZES[TRACED], device).document(options.seed, not options.eager))
    step = contestants.manta(spec, device)
    for _ in range(contestants.WARM_UP):
        step()
    contestants.settle(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            step()
        contestants.settle(device)
    path = options.out.with_name(f"{options.out.stem}-trace.json.gz")
    profile.export_chrome_trace(str(path))
    report.settings["trace"] = str(path)


if __name__ == "__main__":
    sys.exit(main())
