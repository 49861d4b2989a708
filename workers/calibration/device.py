"""Measurements of one device: matrix products and attention by shape, as the engine calls them, and steps of the
engine, which show what operations and moved bytes take; of a GPU also element-wise kernels and copies. It can be
rehearsed on a CPU with tiny shapes.

Kernels are timed with others queued after them, so that the host does not matter; steps are timed by the clock.

Shapes: n tokens, i input width, o output width; s sequence, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from manta.workers.calibration.clock import Run, back_to_back_seconds, median_seconds, release, warm_up
from manta.workers.calibration.measurements import (
    UPDATE,
    AttentionTime,
    BusyTime,
    CopyTime,
    ElementTime,
    Measurements,
    ProductTime,
    StepSeconds,
)
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec, OptimizerConfig
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.parallel.data import adamw
from manta.workers.parallel.data.state import Piece
from manta.workers.parallel.tensor.products import ADDS_WIDER, TorchProducts
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu
from manta.workers.system.resources import processor_name, usable_cores


@dataclass(frozen=True)
class Shapes:
    """The shapes that are measured."""

    products: Sequence[tuple[int, ...]]
    """(n, i, o) in 16 bits: those of models from 100 million parameters on."""
    wide_products: Sequence[tuple[int, ...]]
    """(n, i, o) in fp32, and in TF32."""
    attention: Sequence[tuple[int, ...]]
    """(b, a, s, d)."""
    elements: Sequence[int]
    """Bytes of a tensor in 16 bits."""
    copied: int
    """Bytes."""
    steps: Sequence[dict[str, Any]]
    """Jobs. The small ones are bound by the host; the others show how well the constants add up."""


def document_of(shape: tuple[int, ...], precision: str, **model: Any) -> dict[str, Any]:
    """A job of one rank. `shape`: layers, hidden size, heads, sequence, micro-batch, micro-batches, vocabulary;
    `model`: further keys of that section."""
    layers, hidden, heads, sequence, size, count, vocabulary = shape
    model |= {"layers": layers, "hidden_size": hidden, "heads": heads, "sequence_length": sequence}
    train = {"steps": 1000, "micro_batch_size": size, "global_batch_size": size * count}
    return {
        "model": model | {"vocabulary_size": vocabulary},
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": {**train, "precision": precision, "seed": 1234},
    }


ON_GPU = Shapes(
    products=(
        (1024, 768, 768),
        (2048, 768, 3072),
        (8192, 768, 2304),
        (8192, 3072, 768),
        (4096, 1024, 4096),
        (2048, 2048, 2048),
        (8192, 2048, 6144),
        (4096, 8192, 2048),
        (8192, 2048, 32000),
        (4096, 4096, 4096),
        (8192, 4096, 14336),
    ),
    wide_products=((2048, 1024, 4096), (4096, 2048, 2048)),
    attention=((8, 12, 1024, 64), (2, 12, 1024, 64), (4, 16, 2048, 64), (2, 16, 2048, 128), (1, 16, 4096, 128)),
    elements=(2**15, 2**23, 2**25, 2**28),
    copied=2**28,
    steps=(
        document_of((8, 128, 2, 128, 1, 4, 1024), "bf16", family="gpt", kv_heads=None),
        document_of((8, 128, 2, 128, 1, 4, 1024), "bf16", family="llama", kv_heads=1),
        document_of((8, 128, 2, 128, 1, 4, 1024), "bf16", family="qwen", kv_heads=1),
        document_of((6, 768, 12, 1024, 8, 2, 50304), "bf16", family="gpt", kv_heads=None),
        document_of((4, 2048, 16, 2048, 4, 2, 32000), "bf16", family="llama", kv_heads=8),
        document_of((6, 1024, 16, 2048, 2, 4, 32000), "bf16", family="qwen", kv_heads=8),
    ),
)


def measure_gpu(device: torch.device, shapes: Shapes, say: Callable[[str], None]) -> Measurements:
    """Measures everything, part by part."""
    gpu.use(device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else processor_name()
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    measurements = Measurements(name, usable_cores(), gpu_memory_bytes=memory, adds_wider=ADDS_WIDER)
    say("matrix products and attention")
    warm_up(device)
    measurements.products.extend(product_times(device, torch.bfloat16, shapes.products))
    measurements.products.extend(product_times(device, torch.float32, shapes.wide_products))
    with _rounded_products():
        measurements.products.extend(product_times(device, torch.float32, shapes.wide_products, "tf32"))
    measurements.attention.extend(attention_times(device, torch.bfloat16, shapes.attention))
    say("memory and copies")
    for size in shapes.elements:
        measurements.elements.extend(element_times(device, size))
    measurements.copies.extend(copy_times(device, shapes.copied))
    release()
    say("steps of one rank")
    measurements.steps.extend(step_times(device, shapes.steps))
    return measurements


@contextmanager
def _rounded_products() -> Iterator[None]:
    """Products of fp32 on tensor cores, which round the factors to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def element_times(device: torch.device, size: int) -> list[ElementTime]:
    """Element-wise kernels of the engine on tensors of `size` bytes in 16 bits, twice that in fp32."""
    count = size // 2
    x, y, out = (torch.randn(count, device=device).to(torch.bfloat16) for _ in range(3))
    wide, wide_out = x.float(), y.float()
    rows = x.view(-1, min(2048, count))
    weight = torch.ones(rows.shape[1], device=device, dtype=torch.bfloat16)
    column = torch.ones(len(rows), 1, device=device)
    wide_rows, wide_out_rows = wide.view(rows.shape), wide_out.view(rows.shape)
    runs: dict[str, tuple[int, Run]] = {
        "sum": (6, partial(torch.add, x, y, out=out)),
        "gelu": (4, partial(F.gelu, x)),
        "layer_norm": (4, partial(F.layer_norm, rows, weight.shape, weight, weight)),
        "sum_of_rows": (2, partial(torch.sum, rows, 0, dtype=torch.float32)),
        "widened": (6, partial(wide_out.copy_, x)),
        "rounded": (6, partial(out.copy_, wide)),
        "mixed": (6, partial(torch.mul, rows, column, out=wide_out_rows)),
        "mixed_in_place": (4, partial(out.view(rows.shape).mul_, column)),
        "spread": (8, partial(torch.mul, wide_rows, column, out=wide_out_rows)),
        "mean_of_rows": (4, partial(torch.mean, wide_rows, -1, keepdim=True)),
        "largest_of_rows": (2, partial(torch.amax, rows, 1)),
        "square": (8, partial(torch.mul, wide, wide, out=wide_out)),
        UPDATE: (46, _update(wide, wide_out)),
    }
    return [ElementTime(name, moved * count, back_to_back_seconds(run, device)) for name, (moved, run) in runs.items()]


def _update(values: torch.Tensor, gradient: torch.Tensor) -> Run:
    """The engine's work per parameter at the end of a step without torch.compile: the gradients' norm, their factor,
    AdamW, and 16-bit parameters."""
    means, squares, rounded = torch.zeros_like(values), torch.zeros_like(values), values.to(torch.bfloat16)
    steps = torch.zeros((), dtype=torch.float32, device=values.device)
    factor = torch.ones((), dtype=torch.float64, device=values.device)
    refused = torch.zeros((), dtype=torch.bool, device=values.device)
    groups = {0.1: [Piece(values, gradient, (means, squares), steps, None)]}

    def run() -> None:
        long_rows = gradient.view(-1, min(4096, len(gradient)))
        torch.linalg.vector_norm(long_rows, dim=1)
        torch._foreach_mul_([gradient], factor)
        adamw.update(groups, OptimizerConfig(), 1e-4, refused)
        rounded.copy_(values)

    return run


def copy_times(device: torch.device, size: int) -> list[CopyTime]:
    """Copies to the device and back."""
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    to_device = back_to_back_seconds(partial(there.copy_, here, non_blocking=True), device)
    to_host = back_to_back_seconds(partial(here.copy_, there, non_blocking=True), device)
    return [CopyTime("to_device", size, to_device), CopyTime("to_host", size, to_host)]


ON_CPU = ((64, 128, 128), (128, 256, 256), (256, 256, 1024), (256, 512, 512), (512, 1024, 256), (512, 512, 2048))
"""Products (n, i, o)."""
HEADS_ON_CPU = ((4, 4, 128, 32), (2, 8, 128, 64), (2, 4, 256, 32), (1, 8, 256, 64), (1, 4, 512, 64))
"""Attention (b, a, s, d)."""
_Shapes = Sequence[tuple[int, ...]]


def product_times(
    device: torch.device, dtype: torch.dtype, shapes: _Shapes | None = None, called: str = ""
) -> list[ProductTime]:
    """For each shape: forward, the gradient of the input, and that of the weights, which is added to an fp32 sum.
    `called`: name of the precision, if it differs from that of `dtype`."""
    products, times = TorchProducts(), []
    precision = called or str(dtype).removeprefix("torch.")
    for n, i, o in shapes or ON_CPU:
        x, grad = (torch.randn(n, width, device=device).to(dtype) for width in (i, o))
        weight = torch.randn(o, i, device=device).to(dtype)
        total = torch.zeros(o, i, device=device, dtype=torch.float32)
        runs: dict[str, Run] = {
            "forward": partial(products.output, x, weight),
            "input": partial(products.input_gradient, [grad], [weight]),
            "weight": partial(products.add_weight_gradient, total, grad, x, True),
        }
        for name, run in runs.items():
            times.append(ProductTime(name, precision, n, i, o, _seconds(run, device)))
    return times


def _seconds(run: Run, device: torch.device) -> float:
    return back_to_back_seconds(run, device) if device.type == "cuda" else median_seconds(run, device)


def attention_times(device: torch.device, dtype: torch.dtype, shapes: _Shapes | None = None) -> list[AttentionTime]:
    """Forward and backward of causal attention, together; on a GPU, with `shapes`, also forward alone."""
    times = []
    for b, a, s, d in shapes or HEADS_ON_CPU:
        # If a rank has the whole model, a sample's tokens are contiguous.
        shape, order = ((b, s, a, d), (0, 2, 1, 3)) if shapes else ((s, b, a, d), (1, 2, 0, 3))
        leaves = tuple(torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.randn(shape, device=device).to(dtype).permute(order)
        forward = _seconds(partial(_attend, leaves, order), device) if shapes else None
        both = _seconds(partial(_attend_and_back, leaves, order, grad), device)
        times.append(AttentionTime(b, a, s, d, both, forward))
    return times


def _attend(leaves: tuple[torch.Tensor, ...], order: tuple[int, ...]) -> torch.Tensor:
    q, k, v = (x.permute(order) for x in leaves)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_and_back(leaves: tuple[torch.Tensor, ...], order: tuple[int, ...], grad: torch.Tensor) -> object:
    return torch.autograd.grad(_attend(leaves, order), leaves, grad)


BUSY_ROUNDS, BUSY_SECONDS = 3, 0.5

STEPS_ON_CPU = (
    (4, 32, 2, 16, 1, 8, 256),  # operations
    (2, 64, 2, 64, 2, 8, 256),
    (2, 128, 4, 128, 2, 4, 1024),
    (4, 256, 4, 128, 4, 2, 512),
    (2, 256, 8, 256, 1, 4, 8192),  # the loss
    (2, 512, 8, 32, 1, 1, 512),  # the optimizer
    (2, 512, 8, 256, 2, 2, 512),
)
BUSY = (2, 512, 8, 64, 1, 8, 512)  # arithmetic and memory alike


def layout_document(**parallel: int) -> dict[str, Any]:
    """A minimal job with this number of ranks along each axis; a separate program decides what the ranks do."""
    layers, batch = parallel.get("pipeline", 1), parallel.get("data", 1)
    return document_of((layers, 64, 8, 16, 1, batch, 256), "fp32") | {"parallel": parallel}


def random_batch(spec: JobSpec, device: torch.device) -> list[MicroBatch]:
    """A replica's micro-batches, of random tokens."""
    size, length = spec.train.micro_batch_size, spec.model.sequence_length
    batch = []
    for number in range(spec.micro_batches):
        tokens_sb = torch.randint(spec.vocabulary_size, (length + 1, size), device=device)
        batch.append(MicroBatch(range(number * size, (number + 1) * size), tokens_sb[:-1], tokens_sb[1:]))
    return batch


class OneRank:
    """The engine of a job of one rank."""

    def __init__(self, document: dict[str, Any], device: torch.device):
        spec = parse_job_spec(document)
        self._engine = Engine(spec, Comm(RankGrid(spec.layout), 0, device))
        self._engine.initialise(spec.train.seed)
        self._batch, self._sequences = random_batch(spec, device), spec.train.global_batch_size

    def step(self) -> None:
        """One optimizer step."""
        self._engine.step(self._batch, self._sequences, 1e-4, 0)


def step_times(device: torch.device, documents: Sequence[dict[str, Any]] | None = None) -> list[StepSeconds]:
    """Step times of these jobs of one rank; by default of STEPS_ON_CPU, whose time is dominated by different costs."""
    chosen = documents or [document_of(shape, "fp32") for shape in STEPS_ON_CPU]
    return [StepSeconds(each, median_seconds(OneRank(each, device).step, device, 0.5)) for each in chosen]


def busy_seconds(comm: Comm, _: JobSpec, counts: Sequence[int]) -> list[list[float]]:
    """Program for ranks: for each of `counts`, the seconds of a step of a job of one rank while that many ranks run
    such a job each and the others wait; empty if this rank waits. The counts take turns, BUSY_ROUNDS times, since the
    machine may be slower for a while."""
    rank = OneRank(document_of(BUSY, "fp32"), comm.device)
    rank.step()
    taken: list[list[float]] = [[] for _ in counts]
    for _round in range(BUSY_ROUNDS):
        for at, count in enumerate(counts):
            comm.barrier()
            if comm.rank < count:
                taken[at].append(median_seconds(rank.step, comm.device, BUSY_SECONDS))
    comm.barrier()
    return taken


def as_busy(counts: Sequence[int], by_rank: Sequence[list[list[float]]]) -> list[BusyTime]:
    """Combines the measurements of all ranks: the mean over ranks for each round, and the median of these."""
    rows = []
    for at, count in enumerate(counts):
        rounds = [statistics.mean(rank[at][each] for rank in by_rank[:count]) for each in range(BUSY_ROUNDS)]
        rows.append(BusyTime(count, statistics.median(rounds)))
    return rows
