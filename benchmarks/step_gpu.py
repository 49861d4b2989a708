"""One training step on one GPU in bf16: tokens a second, MFU in both conventions and peak memory, beside the same
model of `transformers` under torch.compile and beside the card's measured matrix-product rate, all in one run.

Three models: GPT of 125 million parameters (sequences of 1,024), of 1.3 billion (2,048), and one as wide as an 8
billion one (4,096) with its layers cut to fit. Then two ranks on the one card, tensor 2 and pipeline 2, whose messages
travel through host memory: loss and gradient norm must be those of one rank.

Needs no more than torch, numpy, pydantic and PyYAML; without `transformers` it says so and leaves that column out.
`--rehearse` runs every line of it on a CPU with tiny models: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.support.hugging_face import gpt2_like
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from workers.accounting.device_peak import measure_peak_flops
from workers.accounting.flops import parameter_count, step_flops
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.config import JobSpec
from workers.data.batches import MicroBatch
from workers.engine import Engine
from workers.errors import MantaError
from workers.spec.reading import parse_job_spec

GOAL_MFU_CAUSAL = 0.45
LEARNING_RATE = 1e-4
AGREEMENT = 2e-2  # bf16 keeps eight bits; loss and norm are means over many roundings


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch."""

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    micro_batch_size: int
    micro_batches: int = 1
    ffn_hidden_size: int | None = None
    vocabulary_size: int = 50304
    recompute: str = "none"

    def document(self, seed: int, compiled: bool, **parallel: Any) -> dict[str, Any]:
        """The job of this model."""
        keys = ("layers", "hidden_size", "heads", "sequence_length", "ffn_hidden_size", "vocabulary_size")
        return {
            "model": {key: getattr(self, key) for key in keys},
            "data": {"source": "python-stdlib"},
            "train": {
                "steps": 1000,
                "global_batch_size": self.micro_batch_size * self.micro_batches,
                "micro_batch_size": self.micro_batch_size,
                "precision": "bf16",
                "compile": compiled,
                "seed": seed,
            },
            "parallel": {"recompute": self.recompute, **parallel},
        }


SIZES = {
    "gpt_125m": Size(12, 768, 12, 1024, micro_batch_size=32),
    "gpt_1b3": Size(24, 2048, 16, 2048, micro_batch_size=8),
    "gpt_8b_wide": Size(10, 4096, 32, 4096, micro_batch_size=2, ffn_hidden_size=14336),
}
PAIRED = Size(4, 512, 8, 256, micro_batch_size=4, micro_batches=4, vocabulary_size=8192)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("step_gpu", __doc__)
    options.add_argument("--steps", type=int, default=10, help="timed steps of each model (default: 10)")
    options.add_argument("--rehearse", action="store_true", help="run on a CPU with tiny models, to try this program")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Measure every model. Raises MantaError where there is no GPU."""
    if not options.rehearse and not torch.cuda.is_available():
        raise MantaError("this benchmark needs a GPU and found none (--rehearse tries the program on a CPU)")
    device = torch.device("cpu" if options.rehearse else "cuda")
    report = Report("step_gpu", options.seed)
    peak = measure_peak_flops(str(device))
    products = _product_rate(device)
    report.add("peak", round(peak.flops / 1e12, 3), "TFLOP/s")
    report.add("matrix_products", round(products / 1e12, 3), "TFLOP/s")
    for name, size in SIZES.items():
        chosen = _tiny(size) if options.rehearse else size
        _measure_size(report, name, chosen, options, device, peak.flops, products)
    if "gpt_1b3_mfu_causal" in report.figures and not options.rehearse:
        reached = report.figures["gpt_1b3_mfu_causal"].value >= GOAL_MFU_CAUSAL
        report.add("gpt_1b3_mfu_causal_reaches_goal", reached, "bool", True)
    _measure_pairs(report, _tiny(PAIRED) if options.rehearse else PAIRED, options.seed, device)
    report.settings = {
        "sizes": {name: vars(size) for name, size in SIZES.items()},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu (a rehearsal)",
        "steps": options.steps,
        "goal_mfu_causal": GOAL_MFU_CAUSAL,
    }
    return report


def _tiny(size: Size) -> Size:
    return replace(
        size,
        layers=2,
        hidden_size=64,
        heads=4,
        ffn_hidden_size=160 if size.ffn_hidden_size else None,
        sequence_length=32,
        micro_batch_size=2,
        vocabulary_size=512,
    )


def _measure_size(
    report: Report,
    name: str,
    size: Size,
    options: argparse.Namespace,
    device: torch.device,
    peak: float,
    products: float,
) -> None:
    spec = parse_job_spec(size.document(options.seed, compiled=True))
    flops = step_flops(spec)
    report.add(f"{name}_parameters", parameter_count(spec), "parameters")
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "manta": lambda: _manta(spec, device),
        "manta_eager": lambda: _manta(parse_job_spec(size.document(options.seed, compiled=False)), device),
        "transformers": lambda: _transformers(spec, device),
    }
    for contestant, make in makers.items():
        prefix = name if contestant == "manta" else f"{name}_{contestant}"
        try:
            seconds, memory = _timed(make, options.steps, device)
        except Exception as error:  # noqa: BLE001 - one contestant's failure must not lose the others' figures
            lines = str(error).splitlines() or [""]
            report.settings[f"{prefix}_left_out"] = f"{type(error).__name__}: {lines[0]}"
            continue
        tokens = spec.train.global_batch_size * spec.model.sequence_length
        report.add(f"{prefix}_step", round(1e3 * seconds, 2), "ms")
        report.add(f"{prefix}_tokens_per_second", round(tokens / seconds, 1), "tokens/s")
        report.add(f"{prefix}_mfu_full", round(flops.model_full / seconds / peak, 4), "ratio")
        report.add(f"{prefix}_mfu_causal", round(flops.model_causal / seconds / peak, 4), "ratio")
        report.add(f"{prefix}_of_matrix_products", round(flops.model_causal / seconds / products, 4), "ratio")
        report.add(f"{prefix}_peak_memory", memory, "bytes")


def _timed(make: Callable[[], Callable[[], object]], steps: int, device: torch.device) -> tuple[float, int]:
    """Median seconds of a step after warm-up, and the most memory that was allocated, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = _step_seconds(make(), steps, device)
    finally:
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return statistics.median(seconds), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _step_seconds(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        _settle(device)
        began = time.perf_counter()
        step()
        _settle(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _product_rate(device: torch.device) -> float:
    """Sustained rate of large bf16 matrix products, FLOP/s."""
    n = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = left @ right
    _settle(device)
    began, count = time.perf_counter(), 50
    for _ in range(count):
        torch.mm(left, right, out=out)
    _settle(device)
    return 2.0 * n**3 * count / (time.perf_counter() - began)


def _tokens(spec: JobSpec, device: torch.device) -> torch.Tensor:
    """Random tokens [s + 1, global batch]."""
    generator = torch.Generator().manual_seed(spec.train.seed)
    shape = (spec.model.sequence_length + 1, spec.train.global_batch_size)
    return torch.randint(spec.vocabulary_size, shape, generator=generator).to(device)


def _batch(spec: JobSpec, device: torch.device) -> list[MicroBatch]:
    parts = _tokens(spec, device).split(spec.train.micro_batch_size, dim=1)
    b = spec.train.micro_batch_size
    return [
        MicroBatch(range(i * b, (i + 1) * b), part[:-1].contiguous(), part[1:].contiguous())
        for i, part in enumerate(parts)
    ]


def _manta(spec: JobSpec, device: torch.device) -> Callable[[], object]:
    engine = Engine(spec, Comm(RankGrid(spec.layout), 0, device))
    engine.initialise(spec.train.seed)
    batch = _batch(spec, device)
    return lambda: engine.step(batch, spec.train.global_batch_size, LEARNING_RATE, 0)


def _transformers(spec: JobSpec, device: torch.device) -> Callable[[], object]:
    """GPT-2 of the same shape with fp32 weights, bf16 autocast, torch.compile and fused AdamW. Raises ImportError
    without transformers."""
    model = gpt2_like(spec).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    compiled = torch.compile(model)
    tokens_bs = _tokens(spec, device).t().contiguous()
    inputs, targets = tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _measure_pairs(report: Report, size: Size, seed: int, device: torch.device) -> None:
    """Two ranks on one device against one."""
    ranks = LocalRanks()
    layouts: dict[str, dict[str, Any]] = {
        "one_rank": {},
        "tensor_2": {"tensor": 2},
        "pipeline_2": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    }
    sized = replace(size, layers=4)
    gathered = {
        name: ranks.run(_few_steps, sized.document(seed, False, **layout), device=str(device))[0]
        for name, layout in layouts.items()
    }
    for name in ("tensor_2", "pipeline_2"):
        pairs = zip(gathered[name], gathered["one_rank"], strict=True)
        furthest = max(abs(a / b - 1.0) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        report.add(f"{name}_largest_difference", round(furthest, 6), "ratio", AGREEMENT)


def _few_steps(comm: Comm, spec: JobSpec) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps."""
    engine = Engine(spec, comm)
    engine.initialise(spec.train.seed)
    batch = _batch(spec, comm.device)
    steps = [engine.step(batch, spec.train.global_batch_size, LEARNING_RATE, 0) for _ in range(3)]
    return [(step.loss, step.grad_norm) for step in steps]


if __name__ == "__main__":
    sys.exit(main())
