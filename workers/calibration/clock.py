"""How long something takes on a device, whatever else the machine does meanwhile as far as that can be told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

SECONDS = 0.05
LEAST_TIMES = 5

Run = Callable[[], object]


def median_seconds(run: Run, device: torch.device, seconds: float = SECONDS) -> float:
    """Median of what `run` takes: of a core's time on a CPU, where others may take turns with this thread; of the time
    between two events on a GPU. Runs for about `seconds`, and some times at least."""
    once = _on_gpu if device.type == "cuda" else _on_core
    once(run, device)  # memory, and the library's choice of kernels
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < LEAST_TIMES or time.perf_counter() - began < seconds:
        taken.append(once(run, device))
    return statistics.median(taken)


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
