"""What 8-bit products do on a device: how fast the products and the casts before them are, and how far the loss of a
training goes from that of the same one in 16 bits.

Shapes: n tokens, i input width, o output width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.support.gpu.contestants import manta_engine, settle
from benchmarks.support.gpu.left_out import going_on
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.report import Report
from manta.workers.data.batches import Batches
from manta.workers.parallel.tensor.fp8 import BY_ROW, BY_TENSOR, E4M3, E5M2, Cast, product
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu

STEPS, STEPS_OF_A_REHEARSAL = 60, 12
SMOOTHED, WARM_UP, LEARNING_RATE = 10, 20, 2e-4
"""A steep beginning would make much of any rounding, bf16's too."""
GOAL_LOSS, GOAL_PRODUCT = 0.01, 0.01
"""Most that the smoothed loss, and a product and the same of what its casts stand for, may differ, relatively."""
KINDS = ("tensorwise", "rowwise")


def measure_losses(report: Report, size: Size, seed: int, device: torch.device) -> None:
    """Train `size` from the same weights on the same text: in bf16; in bf16 with half the micro-batch, whose sums come
    in another order, to see what roundings do by themselves; with each kind of 8-bit products."""
    half = replace(size, micro_batch_size=size.micro_batch_size // 2, micro_batches=2 * size.micro_batches)
    expected, gradient = _trained(size, seed, device, "off")
    report.settings["fp8_losses"] = {"off": [round(loss, 4) for loss in expected]}
    for name, shape, kind in (("bf16_again", half, "off"), *((f"fp8_{kind}", size, kind) for kind in KINDS)):
        losses, other = _trained(shape, seed, device, kind)
        difference = round(largest_difference(losses, expected), 5)
        report.add(f"{name}_loss_difference", difference, "ratio", GOAL_LOSS if kind != "off" else None)
        at_once = round(((other - gradient).norm() / gradient.norm()).item(), 5)
        report.add(f"{name}_gradient_difference", at_once, "ratio")
        report.settings["fp8_losses"][name] = [round(loss, 4) for loss in losses]


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Of the means over each `SMOOTHED` steps in a row, relative to those expected."""
    smoothed = [
        [sum(curve[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(curve) + 1)]
        for curve in (losses, expected)
    ]
    return max(abs(loss - wanted) / wanted for loss, wanted in zip(*smoothed, strict=True))


def _trained(size: Size, seed: int, device: torch.device, kind: str) -> tuple[list[float], torch.Tensor]:
    """Losses of each step on the standard library's text, and the first step's gradient."""
    steps = STEPS if device.type == "cuda" else STEPS_OF_A_REHEARSAL
    spec = parse_job_spec(size.document(seed, False, train={"fp8": kind, "steps": steps}))
    engine, batches, losses, gradient = manta_engine(spec, device), Batches(spec, 0, device), [], torch.empty(0)
    try:
        for step in range(1, steps + 1):
            rate = LEARNING_RATE * min(1.0, step / WARM_UP)
            losses.append(engine.step(batches.training(step), spec.train.global_batch_size, rate, 0).loss)
            if step == 1:
                gradient = engine.optimizer.moments["exp_avg"].clone()  # times 1 - beta1, and clipped
    finally:
        gpu.leave()
        del engine
        gc.collect()
    return losses, gradient


def measure_rates(report: Report, device: torch.device, compiled: bool) -> None:
    """Of products, and of the casts of what is largest, in a layer as wide as an 8 billion model's."""
    n, i, o = (8192, 4096, 14336) if device.type == "cuda" else (64, 32, 48)
    x_ni, w_oi, g_no = (torch.randn(*shape, device=device).bfloat16() for shape in ((n, i), (o, i), (n, o)))
    runs: dict[str, Callable[[], torch.Tensor]] = {"16bit": lambda: x_ni @ w_oi.t()}
    expected = {"16bit": lambda: x_ni.float() @ w_oi.float().t()}
    for kind, plain in zip(KINDS, (BY_TENSOR, BY_ROW), strict=True):
        of_gradients, wide = (E5M2, torch.float32) if kind == "tensorwise" else (E4M3, torch.bfloat16)
        x, w, g = plain.pair(x_ni, E4M3), plain.pair(w_oi, E4M3), plain.pair(g_no, of_gradients)
        runs[kind] = partial(product, x.rows, w.rows, torch.bfloat16)
        expected[kind] = partial(_in_fp32, x.rows, w.rows)
        runs[f"{kind}_weight_gradient"] = partial(product, g.columns, x.columns, wide)
        expected[f"{kind}_weight_gradient"] = partial(_in_fp32, g.columns, x.columns)
        casts = plain.compiled() if compiled else plain
        for name, cast in (("rows", casts.rows), ("columns", casts.columns), ("both", casts.pair)):
            milliseconds = 1e3 * _seconds(partial(cast, g_no, of_gradients), device)
            report.add(f"fp8_cast_{kind}_{name}", round(milliseconds, 4), "ms")
    errors: dict[str, float] = {}
    for name, run in runs.items():
        with going_on(report, f"fp8_product_{name}"):
            report.add(f"fp8_product_{name}", float(f"{2e-12 * n * i * o / _seconds(run, device):.4g}"), "TFLOP/s")
            wanted = expected[name]()
            errors[name] = ((run().float() - wanted).norm() / wanted.norm()).item()
    report.add("fp8_product_largest_error", round(max(errors.values()), 6), "ratio", GOAL_PRODUCT)
    report.settings["fp8_product_errors"] = errors


def _in_fp32(left: Cast, right: Cast) -> torch.Tensor:
    """The product of what these stand for."""
    one, other = (each.values.float() * each.inverse for each in (left, right))
    return one @ other.t()


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
