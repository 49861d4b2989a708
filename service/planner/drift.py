"""Compares the measured steps of a job with its plan, and finds where they differ most. Pure Python.

The planner's parts and those that the engine measures (`workers/timing/step_phases.py`) are divided differently, so
they are compared in groups that mean the same on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manta.service.planner.part_labels import PART_LABELS

SETTLING_STEPS = 5
"""First steps of a generation, which are ignored: caches, allocators and the first kernels take extra time."""
MEASURED_STEPS = 20
"""Number of steps after these, of which the median is taken."""
TOLERANCE = 0.2
"""Largest relative difference from the plan, of a step or its memory, that is not reported."""

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "computing": (("arithmetic", "products", "elementwise", "host", "copies"), ("forward", "backward")),
    "recomputation": (("recomputation",), ("recompute",)),
    "tensor communication": (("tensor",), ("tensor_communication",)),
    "context communication": (("context",), ("context_communication",)),
    "expert communication": (("expert",), ("dispatch", "combine")),
    "waiting for other stages": (("bubble",), ("bubble", "pipeline_communication")),
    "sums of gradients": (("gradients", "replicas"), ("data_communication",)),
    "update": (("optimizer",), ("optimizer",)),
    "loading and the rest": ((), ("data", "other")),
}
"""For each group, by its code: its parts in a plan, and in a measurement."""


@dataclass(frozen=True)
class Measured:
    """Measurements of steps of one generation."""

    first_step: int
    last_step: int
    step_seconds: float
    """Median of the steps."""
    memory_bytes: int | None
    """Maximum over ranks: the peak of a GPU's memory; without GPUs all resident memory, interpreter and libraries
    included."""
    parts: dict[str, float] | None
    """Median seconds of each part that the engine measures, over the steps that were measured in parts and took about
    as long as the median step; None if there are none."""
    spread: float | None = None
    """Interquartile range of the step times, relative to their median; None with fewer than four steps."""

    def to_json(self) -> dict[str, Any]:
        """As JSON, in the form of `manta.api.schemas.MeasuredStep`."""
        return dict(vars(self))


def measured_of(rows: Sequence[Mapping[str, Any]], full_tokens: int) -> Measured | None:
    """Measurements from the rows of metrics of one generation, in order of steps. The first steps, and steps with
    batches smaller than `full_tokens` tokens, are left out; None if no row is left."""
    settled = [row for row in rows[SETTLING_STEPS:] if _is_full(row, full_tokens)]
    if not settled:
        return None
    seconds = [row["step_seconds"] for row in settled]
    memory = [row["memory_bytes"] for row in settled if row.get("memory_bytes") is not None]
    return Measured(
        settled[0]["step"],
        settled[-1]["step"],
        statistics.median(seconds),
        int(max(memory)) if memory else None,
        _parts(settled, statistics.median(seconds)),
        _spread(seconds),
    )


def _spread(seconds: Sequence[float]) -> float | None:
    if len(seconds) < 4:
        return None
    first, median, third = statistics.quantiles(seconds, n=4)
    return (third - first) / median


def _is_full(row: Mapping[str, Any], full_tokens: int) -> bool:
    seconds, rate = row.get("step_seconds"), row.get("tokens_per_second")
    if not isinstance(seconds, int | float) or not isinstance(rate, int | float) or not seconds > 0:
        return False
    return rate * seconds > 0.99 * full_tokens


def _parts(rows: Sequence[Mapping[str, Any]], median: float) -> dict[str, float] | None:
    """Few steps are measured in parts: under uneven load these may have been slower, or faster, than most, and then
    they do not show what most steps spend their time on."""
    names = [name for _, measured in GROUPS.values() for name in measured]
    typical = [row for row in rows if abs(row["step_seconds"] / median - 1) <= TOLERANCE]
    in_parts = [row for row in typical if row.get("forward_seconds") is not None]
    if not in_parts:
        return None
    return {name: statistics.median(float(row.get(f"{name}_seconds") or 0.0) for row in in_parts) for name in names}


@dataclass(frozen=True)
class Compared:
    """One group of parts, planned and measured."""

    name: str
    planned: float
    measured: float
    """Both are seconds of a step."""


def compared(planned: Mapping[str, Any], measured: Measured) -> tuple[Compared, ...]:
    """The groups of the plan and of the measurement; empty if no typical step was measured in parts. `planned`: the
    document of `job_plan.planned`."""
    if measured.parts is None:
        return ()
    of_plan = {part["name"]: part["seconds"] for part in planned["parts"]}
    return tuple(
        Compared(name, sum(of_plan.get(our, 0.0) for our in ours), sum(measured.parts[their] for their in theirs))
        for name, (ours, theirs) in GROUPS.items()
    )


@dataclass(frozen=True)
class Drift:
    """A step, or its memory, is far from what was planned."""

    ratio: float
    """Measured relative to planned."""
    part: str
    """The group that makes most of the difference."""
    message: str


def drift_of(planned: Mapping[str, Any], measured: Measured) -> Drift | None:
    """Whether, and where, a job differs from its plan; None within the tolerance. Time is checked before memory. Times
    of a machine that was neither calibrated nor measured are only good for comparing layouts, so they are not checked;
    memory is checked on GPUs only: elsewhere most of a process's memory is not tensors."""
    step = planned["step_seconds"]
    ratio = measured.step_seconds / step
    if abs(ratio - 1) > TOLERANCE and not planned["assumed"]:
        head = f"Steps take {measured.step_seconds:.2g} s; the plan said {step:.2g} s ({_by(ratio)})."
        part = _largest_difference(compared(planned, measured), step, slower=ratio > 1)
        if part is None:
            return Drift(ratio, "step", f"{head} No such step was measured in parts (train.time_parts_every).")
        times = f"{part.measured:.2g} s instead of the planned {part.planned:.2g} s"
        return Drift(ratio, part.name, f"{head} The largest difference is in {PART_LABELS[part.name]}: {times}.")
    planned_bytes = planned["memory_bytes"]["total"]
    if planned["has_gpus"] and measured.memory_bytes and abs(measured.memory_bytes / planned_bytes - 1) > TOLERANCE:
        ratio = measured.memory_bytes / planned_bytes
        gib = 2**30
        head = (
            f"The fullest rank uses {measured.memory_bytes / gib:.2f} GiB; the plan said {planned_bytes / gib:.2f} GiB"
        )
        return Drift(ratio, "memory", f"{head} ({_by(ratio)}).")
    return None


def _by(ratio: float) -> str:
    """How far a measurement is from the plan, in words that are read at a glance."""
    return f"{ratio:.0f} times the plan" if ratio >= 3 else f"{ratio - 1:+.0%}"


def _largest_difference(groups: Sequence[Compared], step: float, slower: bool) -> Compared | None:
    """The group that differs most; None where the steps measured in parts do not differ from the planned `step` as most
    steps do."""
    sign = 1 if slower else -1
    if sign * (sum(group.measured for group in groups) / step - 1) <= TOLERANCE / 2:
        return None
    return max(groups, key=lambda group: sign * (group.measured - group.planned), default=None)
