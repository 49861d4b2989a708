"""How long something takes on a device, as independent as possible of other work on the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

SECONDS = 0.05
MIN_TIMES = 5
ROUNDS, MAX_TIMES, ROUND_SECONDS = 5, 20, 0.005
SQUARE, MIN_OF_SQUARE = 8192, 4e-4
"""Rows of a square matrix product, and the least seconds that it takes on any GPU."""
BETWEEN, WARM = 10, 600
"""Number of such products before each round, and before the first: a device is measured at the clock rate that its
power limit allows during training, not at that of a rested device."""

Run = Callable[[], object]


spreads: list[float] = []
"""For everything measured in this process: interquartile range of the repetitions, relative to their median."""


def median_seconds(run: Run, device: torch.device, seconds: float = SECONDS) -> float:
    """Median time of `run`: processor time on a CPU, where other threads may interrupt; time between two events on a
    GPU. Runs for about `seconds`, and at least a few times."""
    once = _on_gpu if device.type == "cuda" else _on_core
    once(run, device)  # allocation, and the library's choice of kernels
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < MIN_TIMES or time.perf_counter() - began < seconds:
        taken.append(once(run, device))
    return _median(taken)


def back_to_back_seconds(run: Run, device: torch.device) -> float:
    """Time of `run` on a device that has more of them queued, so that the host does not matter, and that was busy with
    large products before: the median of some rounds. On a CPU like `median_seconds`, only shorter."""
    if device.type != "cuda":
        return median_seconds(run, device, 0.0)
    run()
    alone = _on_gpu(run, device)
    times = max(3, min(MAX_TIMES, int(ROUND_SECONDS / alone)))
    began = time.perf_counter()
    for _ in range(times):
        run()
    queueing = time.perf_counter() - began  # at least the host's time for it
    torch.cuda.synchronize(device)
    return _median([_queued(run, times, queueing, device) for _ in range(ROUNDS)])


def joint_seconds(run: Run, times: int, meet: Run, device: torch.device) -> float:
    """Time of `run` if several processes do it together: the median of some rounds of `times` each, which must be the
    same number for all of them. `meet` returns once all of them have called it. On a GPU it is measured between two
    events, with the rest of a round queued, and after a first run that is not timed, so that waiting for others does
    not count; otherwise by the clock."""
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
    """Seconds of one of `times` runs, which are queued after `before` while the device is busy with other work."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _keep_busy(max(BETWEEN, int(1.5 * queueing / MIN_OF_SQUARE)), device)
    before()
    first.record()
    for _ in range(times):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / times


def warm_up(device: torch.device) -> None:
    """Bring a GPU to the clock rate at which it trains."""
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
    """Free the memory used to keep devices busy."""
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
