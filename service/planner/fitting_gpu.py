"""Fits the constants of a GPU to the measurements of `python -m workers.calibration` on it. Pure Python.

Rates are medians over rows of one kind. The host's time per operation comes from steps of models so small that the
device waits; nothing is fitted to the other steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from service.planner.hardware import (
    MACHINES,
    Cluster,
    Gpu,
    Machine,
    UnknownMachine,
    measured,
    named_by_driver,
)
from service.planner.operations import attention_seconds, product_seconds
from service.planner.software import engine_on
from service.planner.step_time import StepModel
from workers.calibration.measurements import (
    SMALL,
    UPDATE,
    AttentionTime,
    ElementTime,
    Measurements,
    ProductTime,
    StepSeconds,
    step_job,
)

STREAMED = ("sum", "gelu", "square")
"""Kernels that only read and write; how others compare with them is in `engine_passes.py`."""


def machine_measured(measurements: Measurements) -> str:
    """The name in MACHINES of the GPU that was measured. Raises UnknownMachine."""
    return planned_as(measurements.device, measurements.gpu_memory_bytes or 0.0)


def planned_as(device: str, memory_bytes: float) -> str:
    """The name in MACHINES of a GPU that its driver calls `device`. Raises UnknownMachine."""
    name = named_by_driver(device, memory_bytes)
    if name is None:
        raise UnknownMachine(
            f"no plans can be made for GPUs like this one ({device}); known are {', '.join(MACHINES)}. `manta "
            "calibrate --device cpu` measures the cores instead"
        )
    return name


def fit_gpu(measurements: Measurements, machine: Machine) -> Gpu:
    """The constants of a GPU of `machine`. Raises ValueError if rows are missing."""
    smallest, largest = (
        {each.name: each for each in sorted(measurements.elements, key=lambda each: sign * each.moved)}
        for sign in (-1, 1)
    )
    update = _bytes_per_second(largest.pop(UPDATE), 0.0)
    kernel = statistics.median(smallest[name].seconds for name in largest)
    memory = statistics.median(_bytes_per_second(largest[name], kernel) for name in STREAMED)
    copy = min(each.size / each.seconds for each in measurements.copies)
    known = Gpu(1.0, 1.0, 1.0, memory, update, kernel, 0.0, copy, measurements.adds_wider)
    narrow, wide = (
        statistics.median(
            _product_rate(each, known, machine) for each in measurements.products if each.precision == name
        )
        for name in ("bfloat16", "float32")
    )
    known = replace(known, product_16bit=narrow, product_fp32=wide)
    rates = [rate for each in measurements.attention for rate in _attention_rates(each, known, machine)]
    known = replace(known, attention=statistics.median(rates))
    small = [each for each in measurements.steps if step_job(each).model.hidden_size <= SMALL]
    return replace(known, host_seconds=statistics.median(_host_seconds(each, known, machine) for each in small))


def _bytes_per_second(row: ElementTime, kernel: float) -> float:
    return row.moved / max(row.seconds - kernel, row.seconds / 2)


def product_time(row: ProductTime, machine: Machine) -> float:
    """The planner's prediction for a product of a calibration; one for weights is added to an fp32 sum."""
    gpu, width = machine.gpu, 2 if row.precision == "bfloat16" else 4
    assert gpu is not None
    if row.name != "weight":
        n, k = (row.o, row.i) if row.name == "forward" else (row.i, row.o)
        return product_seconds(machine, row.n, n, k, 1, width)
    apart = width == 2 and not gpu.adds_wider
    added = 12 * row.i * row.o / gpu.memory + gpu.kernel_seconds if apart else 4 * row.i * row.o / gpu.memory
    return product_seconds(machine, row.o, row.i, row.n, 1, width) + added


def _product_rate(row: ProductTime, known: Gpu, machine: Machine) -> float:
    """FLOP/s with which the prediction equals the measurement."""

    def seconds(each: float) -> float:
        gpu = replace(known, product_16bit=1 / each, product_fp32=1 / each)
        return product_time(row, measured(machine, gpu))

    return 1 / _solved(seconds, row.seconds, 1 / (10 * machine.accelerator.peak_16bit))


def _attention_rates(row: AttentionTime, known: Gpu, machine: Machine) -> tuple[float, float]:
    """FLOP/s of attention, forward and backward."""
    shape = row.batch * row.heads, row.sequence, row.head_size
    forward, backward = attention_seconds(measured(machine, replace(known, kernel_seconds=0.0)), *shape)
    taken = row.seconds / 3.5 if row.forward_seconds is None else row.forward_seconds
    kernel, least = known.kernel_seconds, row.seconds / 100
    return forward / max(least, taken - kernel), backward / max(least, row.seconds - taken - 3 * kernel)


def step_seconds(row: StepSeconds, machine: Machine) -> float:
    """The planner's prediction for a step of a calibration."""
    return StepModel(step_job(row), Cluster(machine, 1, 1), engine_on(machine)).time().seconds


def _host_seconds(row: StepSeconds, known: Gpu, machine: Machine) -> float:
    """Host seconds per operation with which the prediction for the step equals the measurement."""

    def seconds(each: float) -> float:
        return step_seconds(row, measured(machine, replace(known, host_seconds=each)))

    return _solved(seconds, row.seconds, 1e-9)


def _solved(seconds: Callable[[float], float], wanted: float, least: float) -> float:
    """The x >= `least` with seconds(x) = wanted, for a function that does not decrease."""
    low, high = least, least
    while seconds(high) < wanted:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return high
