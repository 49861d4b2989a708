"""Refines the assumed constants of a machine from the measured steps of jobs. Pure Python.

A plan stores how the seconds of each group of its parts (`drift.GROUPS`) depend on the constants that jobs may move:
`dependence_of` slows down each constant by itself and looks at how the groups change. The predicted time of a group is
then a sum with one term per constant, each multiplied by how much slower that constant is. `refined` looks for these
factors over all jobs: in logarithms, with the least absolute errors (like a median, so that a few wrong jobs do not
count), and no further from one than the jobs require. `docs/planner.md` says which constants jobs move, and why not
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from manta.service.planner.budget import step_shares
from manta.service.planner.drift import GROUPS, Measured, compared
from manta.service.planner.hardware import ASSUMED_CORE, Cluster, Machine, Refined, cpu_machine
from manta.service.planner.step_time import StepModel

MAX_JOBS = 20
"""Most jobs per type of machine that are looked at, the newest first."""
MIN_JOBS = 3
"""Fewest jobs that must depend on a constant before it moves: of two that disagree, nobody knows which is right."""
TELLING = 0.2
"""Smallest part of a group's seconds that must depend on a constant for the group to say something about it."""
MIN_SHARE = 0.05
"""Smallest part of a step for a group to count: effects that are not modelled are as large."""
MOSTLY = 0.75
"""Smallest part of a step that must depend on movable constants for the step as a whole to count: else these would
compensate for what was measured."""
PART_WEIGHT = 0.25
"""Weight of a group relative to the step as a whole. Groups distinguish constants, but their errors do not add up where
ranks share cores: while one rank waits, another has its core, and is faster than predicted."""
MAX_FACTOR = 4.0
"""Largest factor by which a constant moves, either way."""
MAX_SPREAD = 0.25
"""Largest interquartile range of the step times, relative to their median: steps that vary more were disturbed."""

ON_CORES = ("product_fp32", "product_16bit", "memory", "operation_seconds", "link", "message_seconds")
"""The constants of an assumed `Core` that jobs move. The other two only ever appear together with these."""
BETWEEN_GPUS = ("inside", "message", "collective", "spread", "skew_seconds")
"""The constants that a calibration of one GPU leaves assumed; that of several GPUs measures the first."""
ON_GPUS = ("product", "memory", "host_seconds", *BETWEEN_GPUS)
RATIOS = ("product", "memory", "inside", "message", "collective")
"""Constants of `ON_GPUS` that are ratios to a data sheet, and so at most one."""

_SLOWER = 1.1
_NEAR, _PULL, _ROUNDS = 0.05, 0.05, 50
"""Errors (of a logarithm) up to which they count by their squares; the cost of moving a constant relative to a job's
error; and rounds of the search, which converges in far fewer."""


def movable(machine: Machine) -> dict[str, float]:
    """The constants that jobs may move there, with their values without any job: those that were not measured on such a
    machine."""
    if machine.refined is not None:
        return dict(machine.refined.before)
    if machine.core is not None:
        return {name: getattr(machine.core, name) for name in ON_CORES} if machine.core == ASSUMED_CORE else {}
    names = ON_GPUS if machine.gpu is None else BETWEEN_GPUS
    measured = ("inside",) if machine.links is not None else ()
    return {name: getattr(machine.constants, name) for name in names if name not in measured}


def measured_of(machine: Machine) -> dict[str, Any]:
    """The measurements of a calibration, of its GPUs and between them, as a JSON document."""
    return {name: part and asdict(part) for name, part in (("gpu", machine.gpu), ("links", machine.links))}


def constants_of(machine: Machine) -> dict[str, float]:
    """The movable constants with their present values."""
    return {name: float(getattr(machine.core or machine.constants, name)) for name in movable(machine)}


def moved(machine: Machine) -> dict[str, float]:
    """By which factor jobs have moved each constant that they moved."""
    before, after = movable(machine), constants_of(machine)
    return {name: after[name] / before[name] for name in before if after[name] != before[name]}


def with_constants(machine: Machine, values: Mapping[str, float]) -> Machine:
    """The machine with other values for some constants."""
    if machine.core is None:
        return replace(machine, constants=replace(machine.constants, **values))
    memory = machine.accelerator.memory_bytes * machine.devices
    made = cpu_machine(machine.devices, machine.cores, memory, replace(machine.core, **values))
    return replace(made, refined=machine.refined)


def dependence_of(model: StepModel, cluster: Cluster) -> dict[str, Any]:
    """How a planned step depends on the constants that jobs may move, as a JSON document: their `before` and `used`
    values, and for each group the `seconds` that depend on each of them."""
    before, used = movable(cluster.machine), constants_of(cluster.machine)
    whole = _group_seconds(model)
    seconds: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
    for name, value in used.items():
        slower = with_constants(cluster.machine, {name: value * _SLOWER if _is_duration(name) else value / _SLOWER})
        changed = _group_seconds(StepModel(model.spec, replace(cluster, machine=slower), model.software))
        for group in GROUPS:
            if (more := (changed[group] - whole[group]) / (_SLOWER - 1)) > max(1e-9, 1e-3 * whole[group]):
                seconds[group][name] = more
    for group, by_constant in seconds.items():  # time that depends on a product of two constants counts for both
        most = min(1.0, whole[group] / (sum(by_constant.values()) or 1.0))
        seconds[group] = {name: most * each for name, each in by_constant.items()}
    return {"before": before, "used": used, "seconds": seconds}


def _is_duration(name: str) -> bool:
    """Whether a larger value of the constant is slower."""
    return name == "spread" or name.endswith("_seconds")


def _group_seconds(model: StepModel) -> dict[str, float]:
    shares = {share.name: share.seconds for share in step_shares(model, model.time(), 1.0)}
    return {group: sum(shares.get(name, 0.0) for name in names) for group, (names, _) in GROUPS.items()}


@dataclass(frozen=True)
class Row:
    """Measured and planned time of a group of one job's step."""

    measured: float
    """Measured seconds."""
    rest: float
    """Planned seconds that depend on none of the constants."""
    by_constant: Mapping[str, float]
    """Planned seconds that depend on each constant, with its value without any job."""
    share: float
    """The group's share of the step."""

    @property
    def planned(self) -> float:
        """Planned seconds with all constants at their values without any job."""
        return self.rest + sum(self.by_constant.values())

    def predicted(self, slower: Mapping[str, float]) -> dict[str, float]:
        """Predicted seconds by constant, with each constant slower by the given logarithm."""
        return {name: each * math.exp(slower.get(name, 0.0)) for name, each in self.by_constant.items()}


@dataclass(frozen=True)
class Observation:
    """What one job contributes."""

    job: str
    at: float
    """When it began, in Unix seconds."""
    before: Mapping[str, float]
    """The constants that jobs may move, with their values without any job."""
    rows: tuple[Row, ...]
    whole: Row | None = None
    """The whole step, if most of it depends on these constants."""
    measured: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(("gpu", "links")))
    """The calibration (`measured_of`) that it was planned with."""

    def depends_on(self, name: str) -> bool:
        """Whether a good part of one of its groups depends on a constant."""
        return any(row.by_constant.get(name, 0.0) >= TELLING * row.planned for row in self.rows)


def observation(job: str, at: float, planned: Mapping[str, Any], measured: Measured) -> Observation | None:
    """What a job contributes that began at Unix time `at`, from its planned (`job_plan.planned`) and measured step;
    None if nothing. Raises KeyError, TypeError, ValueError if another release has planned it."""
    dependence = planned.get("dependence")
    if dependence is None or not dependence["before"] or measured.parts is None:
        return None
    if measured.spread is None or measured.spread > MAX_SPREAD:
        return None
    slower = {name: _slower(name, dependence["before"][name], value) for name, value in dependence["used"].items()}
    rows, total = [], dict.fromkeys(slower, 0.0)
    for group in compared(planned, measured):
        whole, took = group.planned, group.measured
        share = min(whole / planned["step_seconds"], took / measured.step_seconds)
        used = {name: float(each) for name, each in dependence["seconds"].get(group.name, {}).items()}
        for name, each in used.items():
            total[name] += each
        if share >= MIN_SHARE and used:
            rows.append(_row(took, whole, used, slower, share))
    step = planned["step_seconds"]
    mostly = sum(total.values()) >= MOSTLY * step
    of_step = _row(measured.step_seconds, step, total, slower, 1.0) if mostly else None
    known = {name: planned["cluster"].get(name) for name in ("gpu", "links")}
    return Observation(job, at, dependence["before"], tuple(rows), of_step, known) if rows else None


def _row(took: float, whole: float, used: Mapping[str, float], slower: Mapping[str, float], share: float) -> Row:
    """A row: measured `took`, planned `whole`, of which `used` seconds depend on the constants as they were used."""
    by_constant = {name: each * math.exp(-slower[name]) for name, each in used.items()}
    return Row(took, max(0.0, whole - sum(used.values())), by_constant, share)


def _slower(name: str, before: float, after: float) -> float:
    """The logarithm by which time that depends on a constant grows if it moves from `before` to `after`."""
    return math.log(after / before) if _is_duration(name) else math.log(before / after)


def refined(machine: Machine, seen: Sequence[Observation]) -> Machine:
    """The machine with its constants refined by jobs on such machines, independent of their order; the same machine if
    too few jobs say anything. `seen`: the newest observation of each job, newest first. Observations with other
    unrefined constants, or made with another calibration, do not count."""
    known = movable(machine), measured_of(machine)
    usable = sorted((each for each in seen if (each.before, each.measured) == known), key=lambda each: each.job)
    before, usable = known[0], usable[-MAX_JOBS:]
    names = [name for name in before if sum(each.depends_on(name) for each in usable) >= MIN_JOBS]
    if machine.refined is not None or not names:
        return machine
    slower = _fitted([row for each in usable for row in _rows(each)], names)
    values = {name: _moved(name, before[name], slower[name]) for name in names}
    observations = [each for each in usable if any(each.depends_on(name) for name in names)]
    return replace(with_constants(machine, values), refined=Refined(len(observations), tuple(before.items())))


def _rows(seen: Observation) -> tuple[Row, ...]:
    if seen.whole is None:
        return seen.rows
    return (seen.whole, *(replace(row, share=PART_WEIGHT * row.share) for row in seen.rows))


def _moved(name: str, value: float, slower: float) -> float:
    factor = math.exp(slower if _is_duration(name) else -slower)
    is_part = name in RATIOS and value <= 1  # of a core, `memory` is in bytes/s
    return min(1.0, value * factor) if is_part else value * factor


def _fitted(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """The logarithm by which each constant is slower. It minimises the sum over rows of the absolute difference between
    the logarithms of predicted and measured seconds, weighted by their share of a step, with a small cost for every
    move: least squares in rounds, in which a row counts less the further it is off."""
    slower, most = dict.fromkeys(names, 0.0), math.log(MAX_FACTOR)
    for _ in range(_ROUNDS):
        matrix = [[_PULL if i == j else 0.0 for j in range(len(names))] for i in range(len(names))]
        wanted = [-_PULL * slower[name] for name in names]
        for row in rows:
            predicted = row.predicted(slower)
            whole = row.rest + sum(predicted.values())
            error = math.log(row.measured / whole)
            weight = row.share / max(1.0, abs(error) / _NEAR)
            slopes = [predicted.get(name, 0.0) / whole for name in names]
            for i, slope in enumerate(slopes):
                wanted[i] += weight * slope * error
                for j, other in enumerate(slopes):
                    matrix[i][j] += weight * slope * other
        moves = _solved(matrix, wanted)
        after = {name: min(most, max(-most, slower[name] + move)) for name, move in zip(names, moves, strict=True)}
        still = max(abs(after[name] - slower[name]) for name in names)
        slower = after
        if still < 1e-6:
            break
    return slower


def _solved(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """The x with `matrix` x = `wanted`; the matrix is symmetric and positive definite."""
    rows = [[*row, right] for row, right in zip(matrix, wanted, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, len(pivot)):
                row[j] -= factor * pivot[j]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        row = rows[i]
        solution[i] = (row[-1] - sum(row[j] * solution[j] for j in range(i + 1, len(rows)))) / row[i]
    return solution
