"""The constants of a core, fitted to the measurements of `python -m workers.calibration`. Pure Python.

Rates are medians; constants that several kinds of rows depend on are fitted by least squares of relative errors, with
equal weights. Nothing is fitted to layouts: the rows are single operations, steps of one rank, and collectives between
products of the same size on all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from service.planner.communication import Group, gather_seconds
from service.planner.hardware import Cluster, Core, cpu_machine
from service.planner.shared_cores import SharedCores
from service.planner.software import MANTA_ON_CPU
from service.planner.step_time import StepModel
from workers.calibration.measurements import AttentionTime, CollectiveTime, Measurements, StepSeconds, step_job

NEVER = 1e30
"""A rate so high that nothing takes time."""
FREE = Core(NEVER, NEVER, 0.0, NEVER, 0.0, NEVER, 0.0, 1.0)
"""A core on which nothing takes time."""


def fit_core(measurements: Measurements) -> Core:
    """The constants of a core. Raises ValueError if rows are missing."""
    wide = statistics.median(each.rate for each in measurements.products if each.precision == "float32")
    narrow = statistics.median(each.rate for each in measurements.products if each.precision == "bfloat16")
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
        products = _step_seconds(step, known)
        operations = _step_seconds(step, replace(known, operation_seconds=1.0)) - products
        moved = _step_seconds(step, replace(known, memory=1.0)) - products
        rows.append((operations, moved, step.seconds - products, step.seconds))
    return least_squares(rows)


def _step_seconds(step: StepSeconds, core: Core) -> float:
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
        raise ValueError("too few rows to tell what an operation takes from what a byte takes")
    x, y = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    least_x, least_y = abs(ac / aa) / 100, abs(bc / bb) / 100
    if x < least_x:
        return least_x, max(least_y, (bc - least_x * ab) / bb)
    if y < least_y:
        return max(least_x, (ac - least_y * ab) / aa), least_y
    return x, y
