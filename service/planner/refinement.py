"""What the steps of jobs say of the constants that their plans went by. Pure Python.

A plan keeps how the seconds of each group of its parts (`drift.GROUPS`) depend on the constants that jobs may move:
`dependence_of` slows each of them down by itself and looks at what becomes of the groups. What was measured of a group
is then told by the sum of these, each times what its constant is slower by, and those factors are what `refined` looks
for over all jobs: in logarithms, with the least absolute errors (as a median has them, so that a few wrong jobs do not
count), and no further from one than the jobs ask for. Which constants jobs move, and why not others, is said in
`docs/planner.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from service.planner.budget import step_shares
from service.planner.drift import GROUPS, Measured
from service.planner.hardware import ASSUMED_CORE, Cluster, Machine, Refined, cpu_machine
from service.planner.step_time import StepModel

MOST_JOBS = 20
"""Of a type of machine that are looked at, the newest."""
LEAST_JOBS = 3
"""Jobs that must tell something of a constant before it moves: of two that differ, nobody knows which is right."""
TELLING = 0.2
"""Part of a group's seconds from which on it tells something of a constant."""
LEAST_SHARE = 0.05
"""Part of a step below which a group says nothing: what is not modelled is as large."""
MOSTLY = 0.75
"""Part of a step that must go by constants that jobs may move for the step as a whole to say something of them: else
they would make up for what was measured."""
PART_WEIGHT = 0.25
"""Of a group beside the step as a whole. Groups tell constants apart, but they do not add up where ranks share cores:
while one waits for another, that one has its core, and is faster than it is told to be."""
MOST_FACTOR = 4.0
"""How far a constant moves at most, either way."""
MOST_SPREAD = 0.25
"""Between the quarters of the step times, in units of their median: steps that differ more were disturbed."""

ON_CORES = ("product_fp32", "product_16bit", "memory", "operation_seconds", "link", "message_seconds")
"""What jobs move of an assumed `Core`. The other two only ever act together with these."""
BETWEEN_GPUS = ("inside", "message", "collective", "spread", "skew_seconds")
"""What a calibration of one GPU leaves assumed; that of several measures the first."""
ON_GPUS = ("product", "memory", "host_seconds", *BETWEEN_GPUS)
RATIOS = ("product", "memory", "inside", "message", "collective")
"""Of these, parts of what a data sheet says, which are one at most."""

_SLOWER = 1.1
_NEAR, _PULL, _ROUNDS = 0.05, 0.05, 50
"""Errors (of a logarithm) up to which they count by their squares; what a constant's move costs beside a job's error;
rounds of the search, which ends in far fewer."""


def movable(machine: Machine) -> dict[str, float]:
    """The constants that jobs may move there, as they are without any job: those that were not measured on such a
    machine."""
    if machine.refined is not None:
        return dict(machine.refined.before)
    if machine.core is not None:
        return {name: getattr(machine.core, name) for name in ON_CORES} if machine.core == ASSUMED_CORE else {}
    names = ON_GPUS if machine.gpu is None else BETWEEN_GPUS
    measured = ("inside",) if machine.links is not None else ()
    return {name: getattr(machine.constants, name) for name in names if name not in measured}


def measured_of(machine: Machine) -> dict[str, Any]:
    """What a calibration has measured of its GPUs, and between them, as a JSON document."""
    return {name: part and asdict(part) for name, part in (("gpu", machine.gpu), ("links", machine.links))}


def constants_of(machine: Machine) -> dict[str, float]:
    """The same constants, as they are now."""
    return {name: float(getattr(machine.core or machine.constants, name)) for name in movable(machine)}


def moved(machine: Machine) -> dict[str, float]:
    """Of the constants that jobs have moved, how many times what they were they are."""
    before, after = movable(machine), constants_of(machine)
    return {name: after[name] / before[name] for name in before if after[name] != before[name]}


def with_constants(machine: Machine, values: Mapping[str, float]) -> Machine:
    """The same machine with other values of some constants."""
    if machine.core is None:
        return replace(machine, constants=replace(machine.constants, **values))
    memory = machine.accelerator.memory_bytes * machine.devices
    made = cpu_machine(machine.devices, machine.cores, memory, replace(machine.core, **values))
    return replace(made, refined=machine.refined)


def dependence_of(model: StepModel, cluster: Cluster) -> dict[str, Any]:
    """How a planned step goes by the constants that jobs may move, as a JSON document: `before` and `used` values of
    each, and by group the `seconds` that go by each of them."""
    before, used = movable(cluster.machine), constants_of(cluster.machine)
    whole = _group_seconds(model)
    seconds: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
    for name, value in used.items():
        slower = with_constants(cluster.machine, {name: value * _SLOWER if _takes_time(name) else value / _SLOWER})
        changed = _group_seconds(StepModel(model.spec, replace(cluster, machine=slower), model.software))
        for group in GROUPS:
            if (more := (changed[group] - whole[group]) / (_SLOWER - 1)) > max(1e-9, 1e-3 * whole[group]):
                seconds[group][name] = more
    for group, by_constant in seconds.items():  # what goes by a product of two constants is in both
        most = min(1.0, whole[group] / (sum(by_constant.values()) or 1.0))
        seconds[group] = {name: most * each for name, each in by_constant.items()}
    return {"before": before, "used": used, "seconds": seconds}


def _takes_time(name: str) -> bool:
    """Whether more of a constant is slower."""
    return name == "spread" or name.endswith("_seconds")


def _group_seconds(model: StepModel) -> dict[str, float]:
    shares = {each.name: each.seconds for each in step_shares(model, model.time(), 1.0)}
    return {group: sum(shares.get(name, 0.0) for name in names) for group, (names, _) in GROUPS.items()}


@dataclass(frozen=True)
class Row:
    """A group of one job's step."""

    measured: float
    """Seconds."""
    rest: float
    """Of what was planned, what goes by none of the constants."""
    by_constant: Mapping[str, float]
    """And what goes by each, with its value without any job."""
    share: float
    """Of the step."""

    @property
    def planned(self) -> float:
        """With the constants as they are without any job."""
        return self.rest + sum(self.by_constant.values())

    def predicted(self, slower: Mapping[str, float]) -> dict[str, float]:
        """Seconds by constant where each is slower by a logarithm of so much."""
        return {name: each * math.exp(slower.get(name, 0.0)) for name, each in self.by_constant.items()}


@dataclass(frozen=True)
class Observation:
    """What one job says."""

    job: str
    at: float
    """When it began, Unix seconds."""
    before: Mapping[str, float]
    """The constants that jobs may move, as they were without any job."""
    rows: tuple[Row, ...]
    whole: Row | None = None
    """The step, where most of it goes by these constants."""
    measured: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(("gpu", "links")))
    """What a calibration had measured (`measured_of`) by which it was planned."""

    def tells_of(self, name: str) -> bool:
        """Whether a good part of one of its groups goes by a constant."""
        return any(row.by_constant.get(name, 0.0) >= TELLING * row.planned for row in self.rows)


def observation(job: str, at: float, planned: Mapping[str, Any], measured: Measured) -> Observation | None:
    """What a job says that began `at` that Unix time, and whose step was planned (`job_plan.planned`) and measured;
    None where that is nothing. Raises KeyError, TypeError, ValueError where another release has planned it."""
    dependence = planned.get("dependence")
    if dependence is None or not dependence["before"] or measured.parts is None:
        return None
    if measured.spread is None or measured.spread > MOST_SPREAD:
        return None
    slower = {name: _slower(name, dependence["before"][name], value) for name, value in dependence["used"].items()}
    parts = {part["name"]: float(part["seconds"]) for part in planned["parts"]}
    rows, total = [], dict.fromkeys(slower, 0.0)
    for group, (ours, theirs) in GROUPS.items():
        whole, took = sum(parts.get(name, 0.0) for name in ours), sum(measured.parts[name] for name in theirs)
        share = min(whole / planned["step_seconds"], took / measured.step_seconds)
        used = {name: float(each) for name, each in dependence["seconds"][group].items()}
        for name, each in used.items():
            total[name] += each
        if share >= LEAST_SHARE and used:
            rows.append(_row(took, whole, used, slower, share))
    step = planned["step_seconds"]
    mostly = sum(total.values()) >= MOSTLY * step
    of_step = _row(measured.step_seconds, step, total, slower, 1.0) if mostly else None
    known = {name: planned["cluster"].get(name) for name in ("gpu", "links")}
    return Observation(job, at, dependence["before"], tuple(rows), of_step, known) if rows else None


def _row(took: float, whole: float, used: Mapping[str, float], slower: Mapping[str, float], share: float) -> Row:
    """Of what took so long and was planned to take `whole`, of which `used` goes by the constants as they were used."""
    by_constant = {name: each * math.exp(-slower[name]) for name, each in used.items()}
    return Row(took, max(0.0, whole - sum(used.values())), by_constant, share)


def _slower(name: str, before: float, after: float) -> float:
    """By what, as a logarithm, what goes by a constant is slower after it moved."""
    return math.log(after / before) if _takes_time(name) else math.log(before / after)


def refined(machine: Machine, seen: Sequence[Observation]) -> Machine:
    """The machine with its constants as jobs on such machines say, whatever order they are in; the same one where too
    few say something of it. `seen`: the newest of each job on such machines, newest first; those of other constants
    without any job, or of another calibration (before it, by another release), do not count."""
    known = movable(machine), measured_of(machine)
    usable = sorted((each for each in seen if (each.before, each.measured) == known), key=lambda each: each.job)
    before, usable = known[0], usable[-MOST_JOBS:]
    names = [name for name in before if _is_observed(name, usable)]
    if machine.refined is not None or not names:
        return machine
    slower = _fitted([row for each in usable for row in _rows(each)], names)
    values = {name: _moved(name, before[name], slower[name]) for name in names}
    observations = [each for each in usable if any(each.tells_of(name) for name in names)]
    return replace(with_constants(machine, values), refined=Refined(len(observations), tuple(before.items())))


def _rows(seen: Observation) -> tuple[Row, ...]:
    """What one job says, each by its weight."""
    if seen.whole is None:
        return seen.rows
    return (seen.whole, *(replace(row, share=PART_WEIGHT * row.share) for row in seen.rows))


def _is_observed(name: str, seen: Sequence[Observation]) -> bool:
    return sum(each.tells_of(name) for each in seen) >= LEAST_JOBS


def _moved(name: str, value: float, slower: float) -> float:
    factor = math.exp(slower if _takes_time(name) else -slower)
    is_part = name in RATIOS and value <= 1  # of a core, `memory` is in bytes/s
    return min(1.0, value * factor) if is_part else value * factor


def _fitted(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """By which logarithm each constant is slower: the least sum over the rows of how far the logarithms of predicted
    and measured are apart, each by its share of a step, with a little for every move. Least squares in rounds, of which
    each counts a row the less the further it is off."""
    slower, most = dict.fromkeys(names, 0.0), math.log(MOST_FACTOR)
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
    """x with `matrix` x = `wanted`; the matrix is symmetric and positive definite."""
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
