"""What CUDA graphs of micro-batches save (`train.cuda_graphs`), and that they compute the same: seconds of a step and
memory with and without, next to what is predicted, and losses and weights bit for bit.

The memory of a graph is not among what torch calls allocated, so what its allocator has reserved is reported too.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace

import torch

from benchmarks.support.gpu import contestants
from benchmarks.support.gpu.left_out import going_on
from benchmarks.support.gpu.memory_savers import checked, step_of
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.report import Report
from manta.workers.accounting.device_bytes import device_bytes
from manta.workers.config import JobSpec
from manta.workers.spec.reading import parse_job_spec

MICRO_BATCHES = 8
"""Of a step, which in most other parts is a single large one."""


def measure_graphs(report: Report, sizes: dict[str, Size], options: argparse.Namespace, device: torch.device) -> None:
    """Add the figures of each size to the report."""
    compiled = not options.eager and device.type == "cuda"  # its rehearsal on a CPU does not see compiled code
    for name, size in sizes.items():
        each = max(1, size.micro_batch_size // MICRO_BATCHES)
        cut = replace(size, micro_batch_size=each, micro_batches=MICRO_BATCHES)

        def job(graphs: bool, size: Size = cut, **more: bool) -> JobSpec:
            return parse_job_spec(size.document(options.seed, compiled, train={"cuda_graphs": graphs, **more}))

        with going_on(report, f"graphs_{name}"):
            outcomes = [checked(job(graphs, deterministic_kernels=True), device) for graphs in (False, True)]
            report.add(f"graphs_{name}_same_bits", outcomes[0] == outcomes[1], "bool", True)
            without = _measure(report, f"graphs_{name}_without", job(False), options.steps, device)
            within = _measure(report, f"graphs_{name}_with", job(True), options.steps, device)
            report.add(f"graphs_{name}_with_to_without", round(within / without, 4), "ratio")


def _measure(report: Report, prefix: str, spec: JobSpec, steps: int, device: torch.device) -> float:
    """Seconds of a step."""
    seconds, peak = contestants.timed(functools.partial(step_of, spec, device), steps, device)
    report.add(f"{prefix}_step", round(1e3 * seconds, 2), "ms")
    report.add(f"{prefix}_peak", peak, "bytes")
    report.add(f"{prefix}_reserved", torch.cuda.max_memory_reserved() if device.type == "cuda" else 0, "bytes")
    report.add(f"{prefix}_predicted", device_bytes(spec)[0].total, "bytes")
    return seconds
