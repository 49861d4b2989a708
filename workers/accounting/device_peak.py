"""The peak rate that MFU is measured against: from a table of GPUs, or a measured matrix product."""

from __future__ import annotations

import json
import socket
import time

import torch

from manta.workers.accounting.device_table import known_peak
from manta.workers.config import JobSpec
from manta.workers.protocol.json_codec import JsonObject, to_json
from manta.workers.protocol.messages import PeakRate
from manta.workers.system.threads import threads_of

MEASURE_SECONDS = 0.2
CPU_SIZE, CUDA_SIZE = 768, 8192


def measure_peak_flops(device: str, precision: str | None = None) -> PeakRate:
    """Peak FLOP/s of `device` ("cpu" or "cuda[:n]") at `precision` ("fp32" or "bf16").

    The default precision is fp32 on a CPU and bf16 on a GPU. A CPU is measured with one thread, of which a
    rank may have several; a GPU comes from `workers/accounting/device_table.py`, and is measured when it is not in
    there.
    """
    kind = torch.device(device).type
    precision = precision or ("fp32" if kind == "cpu" else "bf16")
    if kind == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), precision)
        if known is not None:
            return PeakRate(known, "table")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    return PeakRate(_best_product_rate(device, dtype, CPU_SIZE if kind == "cpu" else CUDA_SIZE), "measured")


def peak_of_rank(device: torch.device, spec: JobSpec, of_thread: float | None = None) -> float:
    """Peak FLOP/s of a rank of the job on `device`, at the job's precision, for MFU. `of_thread`: the measured peak of
    one CPU thread, if known."""
    if of_thread is None:
        of_thread = measure_peak_flops(device.type, "fp32" if spec.train.precision == "fp32" else "bf16").peak_flops
    return of_thread * (threads_of(spec) if device.type == "cpu" else 1)


def _best_product_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Best rate of size x size products within about MEASURE_SECONDS, in FLOP/s (2 n^3 a product)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left = torch.rand(size, size, device=device).to(dtype)
        right = torch.rand(size, size, device=device).to(dtype)
        result = torch.mm(left, right)  # warm-up: allocation, and the library's choice of kernel
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() - started < MEASURE_SECONDS:
            _settle(device)
            before = time.perf_counter()
            torch.mm(left, right, out=result)
            _settle(device)
            best = min(best, time.perf_counter() - before)
    finally:
        torch.set_num_threads(threads)
    return 2.0 * size**3 / best


def _settle(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def run(argument: JsonObject, control: socket.socket) -> int:
    """Entry for the zygote: a PeakRate as one JSON line on `control`. Returns the exit code.

    `argument["device"]` defaults to "cpu"; `argument["precision"]` as in `measure_peak_flops`.
    """
    device = argument.get("device") or "cpu"
    peak = measure_peak_flops(device, argument.get("precision"))
    control.sendall(json.dumps(to_json(peak)).encode() + b"\n")
    return 0
