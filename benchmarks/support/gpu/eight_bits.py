"""What 8-bit products do on a device: how fast the products and the casts before them are, and how far the loss of a
training goes from that of the same one in 16 bits.

Shapes: n tokens, i input width, o output width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.support.gpu.contestants import manta_engine, settle
from benchmarks.support.gpu.left_out import going_on
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.report import Report
from workers.data.batches import Batches
from workers.parallel.tensor.fp8_casts import BY_ROW, BY_TENSOR, E4M3, E5M2
from workers.parallel.tensor.fp8_products import product
from workers.spec.reading import parse_job_spec
from workers.system import gpu

STEPS, STEPS_OF_A_REHEARSAL = 60, 12
SMOOTHED, WARM_UP, LEARNING_RATE = 10, 10, 5e-4
GOAL_LOSS = 0.01
"""Most that the smoothed loss may differ, relatively."""
KINDS = ("tensorwise", "rowwise")


def measure_losses(report: Report, size: Size, seed: int, device: torch.device) -> None:
    """Train `size` from the same weights on the same text, with each kind of products and without."""
    curves = {kind: _losses(size, seed, device, kind) for kind in ("off", *KINDS)}
    for kind in KINDS:
        name = f"fp8_{kind}_loss_difference"
        report.add(name, round(largest_difference(curves[kind], curves["off"]), 5), "ratio", GOAL_LOSS)
    report.settings["fp8_losses"] = {kind: [round(loss, 4) for loss in losses] for kind, losses in curves.items()}


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Of the means over each `SMOOTHED` steps in a row, relative to those expected."""
    smoothed = [
        [sum(curve[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(curve) + 1)]
        for curve in (losses, expected)
    ]
    return max(abs(loss - wanted) / wanted for loss, wanted in zip(*smoothed, strict=True))


def _losses(size: Size, seed: int, device: torch.device, kind: str) -> list[float]:
    """Of each step on the standard library's text."""
    steps = STEPS if device.type == "cuda" else STEPS_OF_A_REHEARSAL
    document = size.document(seed, False, train={"fp8": kind, "steps": steps})
    engine = manta_engine(spec := parse_job_spec(document), device)
    batches, losses = Batches(spec, 0, device), []
    try:
        for step in range(1, steps + 1):
            rate = LEARNING_RATE * min(1.0, step / WARM_UP)
            losses.append(engine.step(batches.training(step), spec.train.global_batch_size, rate, 0).loss)
    finally:
        gpu.leave()
        del engine
        gc.collect()
    return losses


def measure_rates(report: Report, device: torch.device, compiled: bool) -> None:
    """Of products, and of the casts of what is largest, in a layer as wide as an 8 billion model's."""
    n, i, o = (8192, 4096, 14336) if device.type == "cuda" else (64, 32, 48)
    x_ni, w_oi, g_no = (torch.randn(*shape, device=device).bfloat16() for shape in ((n, i), (o, i), (n, o)))
    runs: dict[str, Callable[[], object]] = {"16bit": lambda: x_ni @ w_oi.t()}
    for kind, plain in zip(KINDS, (BY_TENSOR, BY_ROW), strict=True):
        of_gradients, wide = (E5M2, torch.float32) if kind == "tensorwise" else (E4M3, torch.bfloat16)
        x, w, g = plain.both(x_ni, E4M3), plain.both(w_oi, E4M3), plain.both(g_no, of_gradients)
        for fast in (False, True):
            name = f"{kind}_{'fast' if fast else 'exact'}"
            runs[name] = partial(product, x.rows, w.rows, torch.bfloat16, fast=fast)
            runs[f"{name}_weight_gradient"] = partial(product, g.columns, x.columns, wide, fast=fast)
        casts = plain.compiled() if compiled else plain
        for name, cast in (("rows", casts.rows), ("columns", casts.columns), ("both", casts.both)):
            milliseconds = 1e3 * _seconds(partial(cast, g_no, of_gradients), device)
            report.add(f"fp8_cast_{kind}_{name}", round(milliseconds, 4), "ms")
    for name, run in runs.items():
        with going_on(report, f"fp8_product_{name}"):
            report.add(f"fp8_product_{name}", round(2e-12 * n * i * o / _seconds(run, device), 3), "TFLOP/s")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one of many in a row."""
    for _ in range(3):
        run()
    settle(device)
    began, count = time.perf_counter(), 20
    for _ in range(count):
        run()
    settle(device)
    return (time.perf_counter() - began) / count
