"""What takes less memory on a device, in a Llama with many token ids: the logits of a few tokens at a time, and
activations or the optimizer's state in host memory. Peak memory, next to what is predicted, time of a step, and whether
the numbers are the same.

Each computes the same steps by kernels that give the same bits each time, from the same weights: what waited elsewhere
must give the very bits, fewer logits at once the numbers to rounding. Steps are timed compiled, except those that
recompute norms and activations, which compiled blocks do not allow.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.support.gpu import contestants
from benchmarks.support.gpu.left_out import going_on
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.replayed_operations import ReplayedOperations
from benchmarks.support.report import Report
from manta.workers.accounting.activation_bytes import host_bytes_of_rank
from manta.workers.accounting.device_bytes import device_bytes
from manta.workers.accounting.state_costs import host_state_bytes
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.errors import MantaError
from manta.workers.parallel import recompute
from manta.workers.parallel.data import offloaded
from manta.workers.parallel.tensor.shards import NamedShard
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu

CHECKED_STEPS = 3
GOAL_LOSS = 1e-3
"""Most that a loss may differ, relatively."""
SPREAD = 0.02
Outcome = tuple[list[float], int]


def savers(size: Size, on_gpu: bool) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Keys of the sections train and parallel, by name."""
    few, dropped = (2048 if on_gpu else 16), {"recompute": "selective", "recompute_modules": ["norm", "mlp_activation"]}
    state = {"optimizer": {"offload": True}}

    def waiting(part: int) -> dict[str, Any]:
        return {"offload_layers": size.layers // part}

    return {
        "plain": ({}, {}),
        "head": ({"head_tokens": few}, {}),
        "offload_third": ({}, waiting(3) if on_gpu else waiting(2)),
        "offload_half": ({}, waiting(2)),
        "selective": ({"head_tokens": few}, dropped),
        "selective_offload_half": ({"head_tokens": few}, dropped | waiting(2)),
        "full": ({"head_tokens": few}, {"recompute": "full"}),
        "full_offload": ({"head_tokens": few}, {"recompute": "full"} | waiting(1)),
        "offload_state": (state, {}),
        "full_offload_and_state": ({"head_tokens": few} | state, {"recompute": "full"} | waiting(1)),
    }


def measure_memory_savers(report: Report, size: Size, options: argparse.Namespace, device: torch.device) -> None:
    """Add figures of each to the report."""
    expected: Outcome | None = None
    for name, (train, parallel) in savers(size, device.type == "cuda").items():
        with going_on(report, f"memory_{name}"):

            def job(compiled: bool, parallel: dict[str, Any] = parallel, **more: Any) -> JobSpec:
                return parse_job_spec(size.document(options.seed, compiled, train=more, parallel=parallel))

            # In compiled blocks the compiler chooses what of norms and activations is recomputed (spec/rules.py).
            compiled = not options.eager and "recompute_modules" not in parallel
            _measure(report, name, job(compiled, **train), options.steps, device)
            spec = job(False, **train, deterministic_kernels=True)
            outcome = checked(spec, device)
            if expected is None:
                expected = outcome
                report.add("memory_plain_same_bits_twice", checked(spec, device) == expected, "bool", True)
            else:
                _compare(report, name, outcome, expected, wants_bits="head_tokens" not in train)


def _measure(report: Report, name: str, spec: JobSpec, steps: int, device: torch.device) -> None:
    seconds, peak = contestants.timed(functools.partial(step_of, spec, device), steps, device)
    report.add(f"memory_{name}_step", round(1e3 * seconds, 2), "ms")
    report.add(f"memory_{name}_peak", peak, "bytes")
    report.add(f"memory_{name}_predicted", device_bytes(spec)[0].total, "bytes")
    on_host = host_bytes_of_rank(spec, 0, spec.micro_batches) + host_state_bytes(spec, 0)
    report.add(f"memory_{name}_host_predicted", on_host, "bytes")


def _compare(report: Report, name: str, outcome: Outcome, expected: Outcome, wants_bits: bool) -> None:
    error = max(abs(loss - plain) / plain for loss, plain in zip(outcome[0], expected[0], strict=True))
    report.add(f"memory_{name}_loss_difference", float(f"{error:.3g}"), "ratio", GOAL_LOSS)
    if wants_bits:
        report.add(f"memory_{name}_same_bits", outcome == expected, "bool", True)


def engine_of(spec: JobSpec, device: torch.device) -> Engine:
    """With weights drawn on the device, which takes no time. On a CPU what `train.cuda_graphs` wants is rehearsed."""
    gpu.use_for(spec, device)
    new_recording = ReplayedOperations if device.type == "cpu" else None
    engine = Engine(spec, Comm(RankGrid(spec.layout), 0, device), new_recording=new_recording)
    generator = torch.Generator(device).manual_seed(spec.train.seed)

    def fill(entry: NamedShard, part: torch.Tensor) -> None:
        if entry.shard.group == "norm":
            part.fill_(1.0)
        else:
            part.normal_(0.0, SPREAD, generator=generator)

    engine.begin_with(fill)
    return engine


def step_of(spec: JobSpec, device: torch.device) -> Callable[[], object]:
    """A step of the job's engine, to be called again and again."""
    engine, batch = engine_of(spec, device), contestants.batch_of(spec, device)
    return lambda: engine.step(batch, spec.train.global_batch_size, contestants.LEARNING_RATE, 0)


def checked(spec: JobSpec, device: torch.device) -> Outcome:
    """Losses of some steps, and a number of all bits of the weights after them. On a CPU, whose models are tiny, all
    activations are large, and slices of the state small. Raises MantaError where `train.cuda_graphs` recorded
    nothing."""
    sizes = recompute.OFFLOADED_BYTES, offloaded.SLICE_ELEMENTS
    if device.type == "cpu":
        recompute.OFFLOADED_BYTES, offloaded.SLICE_ELEMENTS = 0, 64
    try:
        engine, batch = engine_of(spec, device), contestants.batch_of(spec, device)
        rate, sequences = contestants.LEARNING_RATE, spec.train.global_batch_size
        losses = [engine.step(batch, sequences, rate, 0).loss for _ in range(CHECKED_STEPS)]
        if engine.not_recorded is not None:
            raise MantaError(f"no micro-batch could be recorded: {engine.not_recorded}")
        return losses, _fingerprint(engine.flat.parameters)
    finally:
        recompute.OFFLOADED_BYTES, offloaded.SLICE_ELEMENTS = sizes
        gpu.leave()
        del engine
        gc.collect()  # else the next one's peak is both's
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _fingerprint(values: torch.Tensor) -> int:
    """Another one for almost every other bits of a vector of 16-bit numbers."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for number, part in enumerate(values.view(torch.int16).split(2**26)):
        places = torch.arange(len(part), device=values.device) % 65521 + 1
        total += (part.to(torch.int64) * places).sum() * (2 * number + 1)
    return int(total.item())
