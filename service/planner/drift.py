"""What steps of a job really take beside what was planned of them, and where they differ most. Pure Python.

The planner's parts and those that the engine measures (`workers/timing/step_parts.py`) are cut differently, so they are
compared in groups that mean the same on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTLING_STEPS = 5
"""First steps of a generation that are not looked at: caches, allocators and the first kernels take their time."""
MEASURED_STEPS = 20
"""Steps after these of which the median is taken."""
TOLERANCE = 0.2
"""Part by which a step, or its memory, may differ from what was planned before it is said."""

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "computing": (("arithmetic", "products", "elementwise", "host", "copies"), ("forward", "backward")),
    "recomputation": (("recomputation",), ("recompute",)),
    "tensor communication": (("tensor",), ("tensor_communication",)),
    "waiting for other stages": (("bubble",), ("bubble", "pipeline_communication")),
    "sums of gradients": (("gradients", "replicas"), ("data_communication",)),
    "update": (("optimizer",), ("optimizer",)),
    "loading and the rest": ((), ("data", "other")),
}
"""By what people call it: parts of a plan, and of a measurement."""


@dataclass(frozen=True)
class Measured:
    """What steps of one generation took."""

    first_step: int
    last_step: int
    step_seconds: float
    """Median."""
    memory_bytes: int | None
    """Most of any rank: of a GPU's memory the peak; else all that is resident, interpreter and libraries included."""
    parts: dict[str, float] | None
    """Seconds by part of the engine's measurement, medians; None where no step was measured in parts."""
    spread: float | None = None
    """Between the quarters of the steps' times, of their median; None of fewer than four steps."""

    def to_json(self) -> dict[str, Any]:
        """In the form of `api.schemas.MeasuredStep`."""
        return dict(vars(self))


def measured_of(rows: Sequence[Mapping[str, Any]], full_tokens: int) -> Measured | None:
    """Of the rows of metrics of one generation, by step; those of its first steps and of smaller batches than of
    `full_tokens` tokens are left out. None where no row is left."""
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
        _parts(settled),
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


def _parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    names = [name for _, measured in GROUPS.values() for name in measured]
    in_parts = [row for row in rows if row.get("forward_seconds") is not None]
    if not in_parts:
        return None
    return {name: statistics.median(float(row.get(f"{name}_seconds") or 0.0) for row in in_parts) for name in names}


@dataclass(frozen=True)
class Compared:
    """One group of parts."""

    name: str
    planned: float
    measured: float
    """Seconds of a step."""


def compared(planned: Mapping[str, Any], measured: Measured) -> tuple[Compared, ...]:
    """The groups of both; none where the steps were not measured in parts. `planned`: as `job_plan.planned` has it."""
    if measured.parts is None:
        return ()
    of_plan = {part["name"]: part["seconds"] for part in planned["parts"]}
    return tuple(
        Compared(name, sum(of_plan.get(each, 0.0) for each in ours), sum(measured.parts[each] for each in theirs))
        for name, (ours, theirs) in GROUPS.items()
    )


@dataclass(frozen=True)
class Drift:
    """A step, or its memory, is far from what was planned."""

    ratio: float
    """Of what is measured to what was planned."""
    part: str
    """What makes most of the difference."""
    message: str


def drift_of(planned: Mapping[str, Any], measured: Measured) -> Drift | None:
    """Whether, and where, a job is not as it was planned; None within the tolerance. Time is looked at before memory,
    and memory on GPUs only: elsewhere what a process holds is mostly not tensors."""
    step = planned["step_seconds"]
    ratio = measured.step_seconds / step
    tail = _tail(planned)
    if abs(ratio - 1) > TOLERANCE:
        head = f"a step takes {measured.step_seconds:.3g} s, planned were {step:.3g} s ({ratio - 1:+.0%})"
        part = _largest_difference(compared(planned, measured), slower=ratio > 1)
        if part is None:
            return Drift(ratio, "step", f"{head}; which part of it was not measured (train.time_parts_every){tail}")
        where = f"most of that is {part.name}: {part.measured:.3g} s, planned were {part.planned:.3g} s"
        return Drift(ratio, part.name, f"{head}; {where}{tail}")
    planned_bytes = planned["memory_bytes"]["total"]
    if planned["has_gpus"] and measured.memory_bytes and abs(measured.memory_bytes / planned_bytes - 1) > TOLERANCE:
        ratio = measured.memory_bytes / planned_bytes
        gib = 2**30
        head = (
            f"the fullest rank takes {measured.memory_bytes / gib:.2f} GiB, planned were {planned_bytes / gib:.2f} GiB"
        )
        return Drift(ratio, "memory", f"{head} ({ratio - 1:+.0%})")
    return None


def _largest_difference(groups: Sequence[Compared], slower: bool) -> Compared | None:
    sign = 1 if slower else -1
    return max(groups, key=lambda each: sign * (each.measured - each.planned), default=None)


def _tail(planned: Mapping[str, Any]) -> str:
    if not planned["assumed"]:
        return ""
    if planned["has_gpus"]:
        return ". What such a GPU reaches is assumed: `manta calibrate` on such a node measures it"
    return ". What this machine reaches is assumed: `manta calibrate` measures it"
