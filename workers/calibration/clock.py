"""How long something takes on a device, whatever else the machine does meanwhile as far as that can be told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

SECONDS = 0.05
LEAST_TIMES = 5
ROUNDS, MOST_TIMES, ROUND_SECONDS = 5, 20, 0.005
SQUARE, LEAST_OF_SQUARE = 8192, 4e-4
"""Rows of a square product, and seconds that it takes on any GPU at least."""
BETWEEN, WARM = 10, 600
"""Such products in front of each round, and before anything: what a device is measured at is the clock that is left to
it by its limit of power while it trains, and not that of one that has rested."""

Run = Callable[[], object]


spreads: list[float] = []
"""Of everything that was measured here, how far its repetitions were apart: between their quarters, of their median."""


def median_seconds(run: Run, device: torch.device, seconds: float = SECONDS) -> float:
    """Median of what `run` takes: of a core's time on a CPU, where others may take turns with this thread; of the time
    between two events on a GPU. Runs for about `seconds`, and some times at least."""
    once = _on_gpu if device.type == "cuda" else _on_core
    once(run, device)  # memory, and the library's choice of kernels
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < LEAST_TIMES or time.perf_counter() - began < seconds:
        taken.append(once(run, device))
    return _median(taken)


def back_to_back_seconds(run: Run, device: torch.device) -> float:
    """What `run` takes of a device that has more of them queued behind it, so that no host is waited for, and that was
    busy with large products before: the median of some rounds. On a CPU as `median_seconds`, only shorter."""
    if device.type != "cuda":
        return median_seconds(run, device, 0.0)
    run()
    alone = _on_gpu(run, device)
    times = max(3, min(MOST_TIMES, int(ROUND_SECONDS / alone)))
    began = time.perf_counter()
    for _ in range(times):
        run()
    queueing = time.perf_counter() - began  # at least what the host needs for it
    torch.cuda.synchronize(device)
    return _median([_queued(run, times, queueing, device) for _ in range(ROUNDS)])


def joint_seconds(run: Run, times: int, meet: Run, device: torch.device) -> float:
    """What `run` takes that several processes do together: the median of some rounds of `times` each, the same number
    for all of them. `meet` returns once all are there. On a GPU between two events, with the others of a round queued
    behind, after one that none is timed by, so that nobody is waited for; else by the clock."""
    run()
    meet()
    began = time.perf_counter()
    for _ in range(times + 1):
        run()
    queueing = time.perf_counter() - began
    taken = []
    for _ in range(ROUNDS):
        meet()
        if device.type == "cuda":
            taken.append(_queued(run, times, queueing, device, before=run))
            continue
        began = time.perf_counter()
        for _ in range(times):
            run()
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken)


def _median(taken: list[float]) -> float:
    median = statistics.median(taken)
    if len(taken) > 1:
        first, _, third = statistics.quantiles(taken, n=4)
        spreads.append((third - first) / median)
    return median


def _queued(run: Run, times: int, queueing: float, device: torch.device, before: Run = lambda: None) -> float:
    """Seconds of one of so many runs, which are queued, behind `before`, while the device is busy with something
    else."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _keep_busy(max(BETWEEN, int(1.5 * queueing / LEAST_OF_SQUARE)), device)
    before()
    first.record()
    for _ in range(times):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / times


def warm_up(device: torch.device) -> None:
    """Bring a GPU to the clock at which it trains."""
    if device.type == "cuda":
        _keep_busy(WARM, device)
        torch.cuda.synchronize(device)


def _keep_busy(products: int, device: torch.device) -> None:
    square = _square(device)
    out = torch.empty_like(square)
    for _ in range(products):
        torch.mm(square, square, out=out)


@cache
def _square(device: torch.device) -> torch.Tensor:
    return torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)


def release() -> None:
    """Give back what kept devices busy."""
    _square.cache_clear()


def _on_core(run: Run, _: torch.device) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def _on_gpu(run: Run, device: torch.device) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        first.record()
        run()
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
