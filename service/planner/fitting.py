"""The constants of a core, a GPU, and the links between the GPUs of a node, fitted to the measurements of `python -m
manta.workers.calibration`. Pure Python.

Rates are medians over rows of one kind; constants that several kinds of rows depend on are fitted by least squares of
relative errors, with equal weights. Nothing is fitted to layouts: the rows are single operations, steps of one rank,
and collectives between products of the same size on all ranks. The host's time per operation of a GPU comes from
steps of models so small that the device waits.

The planner's own formulas say how much of a row of links depends on each constant. Every row counts the same, by the
difference between the logarithms of predicted and measured seconds: if pairs of GPUs have links of their own, the fit
yields the constants of the larger groups, of which there are more rows, and not a mean that holds for neither (decision
0043).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from manta.service.planner.communication import Group, gather_seconds, message_seconds, reduce_seconds
from manta.service.planner.hardware import (
    MACHINES,
    Cluster,
    Core,
    Gpu,
    Links,
    Machine,
    UnknownMachine,
    cpu_machine,
    linked,
    measured,
    named_by_driver,
)
from manta.service.planner.operations import attention_seconds, product_seconds
from manta.service.planner.pipeline import SharedCores
from manta.service.planner.software import MANTA_ON_CPU, engine_on
from manta.service.planner.step_time import StepModel
from manta.workers.calibration.measurements import (
    SMALL,
    UPDATE,
    AttentionTime,
    CollectiveTime,
    ElementTime,
    Measurements,
    ProductTime,
    StepSeconds,
    step_job,
)

NEVER = 1e30
"""A rate so high that nothing takes time."""
FREE = Core(NEVER, NEVER, 0.0, NEVER, 0.0, NEVER, 0.0, 1.0)
"""A core on which nothing takes time."""
STREAMED = ("sum", "gelu", "square")
"""Kernels that only read and write; how others compare with them is in `engine_passes.py`."""
_ROUNDS, _NEAR, _FAR = 60, 0.02, 0.5
"""Rounds of the fit, which converges in fewer; and errors (of a logarithm) up to which they count by their squares, and
the most that one round corrects."""


def fit_core(measurements: Measurements) -> Core:
    """The constants of a core. Raises ValueError if rows are missing."""
    wide = statistics.median(product.rate for product in measurements.products if product.precision == "float32")
    narrow = statistics.median(product.rate for product in measurements.products if product.precision == "bfloat16")
    width = statistics.median(_attention_width(each, wide) for each in measurements.attention)
    known = replace(FREE, product_fp32=wide, product_16bit=narrow, attention_width=width)
    operation, byte = _fit_steps(measurements.steps, known)
    message, link_byte = _fit_collectives(measurements.collectives, measurements.cores)
    alone, *together = (each.seconds for each in measurements.busy)
    return Core(
        product_fp32=wide,
        product_16bit=narrow,
        attention_width=width,
        memory=1 / byte,
        operation_seconds=operation,
        link=1 / link_byte,
        message_seconds=message,
        all_busy=min(1.0, alone / statistics.mean(together)),
    )


def _attention_width(row: AttentionTime, rate: float) -> float:
    """The additional width of a head, in elements, that would take as long as the softmax: what is left of the row's
    time after its products at `rate` FLOP/s. A forward has two products over all scores, a backward counts as two and a
    half forwards."""
    scores = row.batch * row.heads * row.sequence**2
    return max(0.0, row.seconds * rate / (3.5 * 4 * scores) - row.head_size)


def _fit_steps(steps: Sequence[StepSeconds], known: Core) -> tuple[float, float]:
    """Seconds of an operation and of a moved byte, which explain the time of steps of one rank without products."""
    rows = []
    for step in steps:
        products = _step_seconds_on_core(step, known)
        operations = _step_seconds_on_core(step, replace(known, operation_seconds=1.0)) - products
        moved = _step_seconds_on_core(step, replace(known, memory=1.0)) - products
        rows.append((operations, moved, step.seconds - products, step.seconds))
    return least_squares(rows)


def _step_seconds_on_core(step: StepSeconds, core: Core) -> float:
    return StepModel(step_job(step), Cluster(cpu_machine(1, 1, 1e12, core), 1, 1), MANTA_ON_CPU).time().seconds


def _fit_collectives(rows: Sequence[CollectiveTime], cores: int) -> tuple[float, float]:
    """Seconds of a message and of each of its bytes, at either end."""
    prepared = []
    for row in rows:
        messages = _collective_seconds(row, cores, replace(FREE, message_seconds=1.0))
        sent = _collective_seconds(row, cores, replace(FREE, link=1.0))
        prepared.append((messages, sent, row.seconds, row.seconds))
    return least_squares(prepared)


def _collective_seconds(row: CollectiveTime, cores: int, core: Core) -> float:
    cluster = Cluster(cpu_machine(row.ranks, cores, 1e12, core), 1, row.ranks)
    alone = gather_seconds(Group(row.ranks, row.ranks), cluster, row.size)
    return alone / SharedCores(cores, row.ranks, 1.0).speed(1)


def least_squares(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """x, y > 0 that minimize the squares of (a x + b y - c) / scale over rows (a, b, c, scale). Each is at least a
    hundredth of the value that would fit best without the other. Raises ValueError if the rows do not determine
    both."""
    scaled = [(a / scale, b / scale, c / scale) for a, b, c, scale in rows]
    aa, ab, bb = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(row[i] * row[2] for row in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        raise ValueError("too few rows to separate the time per operation from the time per byte")
    x, y = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    least_x, least_y = abs(ac / aa) / 100, abs(bc / bb) / 100
    if x < least_x:
        return least_x, max(least_y, (bc - least_x * ab) / bb)
    if y < least_y:
        return max(least_x, (ac - least_y * ab) / aa), least_y
    return x, y


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
            _product_rate(product, known, machine) for product in measurements.products if product.precision == name
        )
        for name in ("bfloat16", "float32")
    )
    known = replace(known, product_16bit=narrow, product_fp32=wide)
    rates = [rate for each in measurements.attention for rate in _attention_rates(each, known, machine)]
    known = replace(known, attention=statistics.median(rates))
    small = [step for step in measurements.steps if step_job(step).model.hidden_size <= SMALL]
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


def fit_links(rows: Sequence[CollectiveTime], machine: Machine) -> Links:
    """The constants of the links inside a node of `machine`. Raises ValueError if rows are missing."""
    per_hop, per_byte = linked(machine, Links(NEVER, 1.0)), linked(machine, Links(1.0, 0.0))
    shares = [(exchange_seconds(row, per_hop), exchange_seconds(row, per_byte), row.seconds) for row in rows]
    hop, byte = least_squares([(*share, share[-1]) for share in shares])
    for _ in range(_ROUNDS):
        hop, byte = least_squares([_corrected(*share, hop, byte) for share in shares])
    errors = [abs(math.log((hops * hop + moved * byte) / seconds)) for hops, moved, seconds in shares]
    return Links(1 / byte, hop, statistics.mean(errors))


def _corrected(hops: float, moved: float, seconds: float, hop: float, byte: float) -> tuple[float, float, float, float]:
    """A row of the next round's least squares: the prediction with these constants, corrected by its error, and scaled
    so that the square counts as the error itself."""
    predicted = hops * hop + moved * byte
    error = max(-_FAR, min(_FAR, math.log(predicted / seconds)))
    return hops, moved, predicted * (1 - error), predicted * math.sqrt(max(_NEAR, abs(error)))


def exchange_seconds(row: CollectiveTime, machine: Machine) -> float:
    """The planner's prediction for a row of a calibration."""
    cluster, group = Cluster(machine, 1, row.ranks), Group(row.ranks, row.ranks)
    if row.kind == "message":
        return message_seconds(cluster, row.size, True)
    return (reduce_seconds if row.kind == "all_reduce" else gather_seconds)(group, cluster, row.size)
