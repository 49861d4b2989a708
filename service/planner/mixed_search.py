"""The fastest layouts of a job on a cluster of unequal nodes. Pure Python.

Besides all layouts on nodes of one kind there are layouts whose pipeline spans several: its first stages on nodes of
one kind, the next on nodes of another, with fewer layers where nodes are slower. All replicas have the same stages, and
tensor groups have one size everywhere, since the engine runs nothing else. Layers are shared out so that the slowest
stage is as fast as possible within the memory of each stage; then the step is simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, permutations, product

from manta.service.planner.bounds import SLACK, Bounds
from manta.service.planner.candidates import (
    COMPLETE,
    RECOMPUTE,
    SIMPLEST,
    Candidate,
    max_stages,
    micro_batch_sizes,
    rank_totals,
    replicas_allowed,
    schedules,
)
from manta.service.planner.hardware import Cluster
from manta.service.planner.memory import by_kind, rank_with_least_room
from manta.service.planner.pipeline import StageTimes, min_pipeline_seconds
from manta.service.planner.search import MAX_REJECTED, Answer, Plan, Rejected, no_products, plan_of, search
from manta.service.planner.software import engine_on
from manta.service.planner.stage_shares import Counts, chunks_of, shared_out
from manta.service.planner.step_time import MixedStepModel, slowest_of
from manta.workers.config import JobSpec
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import find_problems

MAX_IN_A_PIPELINE = 3
"""Most kinds of nodes in one pipeline."""
FEW_CHUNKS = (1, 2, 4)
"""Numbers of virtual stages per rank that are looked at on large clusters."""
MAX_FAILED_TRIES = 100
"""Most layouts of a large cluster that are simulated in a row without improving the result."""


@dataclass(frozen=True)
class _Frame:
    """Sizes of the axes that there is room for on several kinds of nodes."""

    order: tuple[int, ...]
    """Parts of the cluster, in the pipeline's order."""
    stages: tuple[int, ...]
    """Number of stages on each part."""
    tensor: int
    data: int

    @property
    def part_of_stage(self) -> list[int]:
        """The part that each stage is on."""
        return [part for part, count in zip(self.order, self.stages, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class _Mixed:
    """A layout within such a frame."""

    frame: _Frame
    shape: Candidate

    @property
    def recomputing_nothing(self) -> _Mixed:
        """This layout without recomputation."""
        return replace(self, shape=self.shape._replace(recompute="none"))


def best_layouts(job: JobSpec, cluster: Cluster, limit: int = 5) -> Answer:
    """The `limit` fastest layouts that the rules allow and that fit, on equal or unequal nodes."""
    if cluster.others:
        return search_mixed(job, cluster, limit)
    return search(job, cluster, engine_on(cluster.machine), limit)


def search_mixed(job: JobSpec, cluster: Cluster, limit: int = 5) -> Answer:
    """The `limit` fastest layouts on nodes of one kind or over several. Deterministic."""
    answers = [_on_one_kind(job, part, limit) for part in cluster.parts]
    plans = sorted((plan for answer in answers for plan in answer.plans), key=lambda each: each.time.seconds)[:limit]
    best = sorted([*plans, *_over_several(job, cluster, limit, plans)], key=lambda each: each.time.seconds)[:limit]
    most = MAX_REJECTED // len(answers)
    return Answer(tuple(best), tuple(each for answer in answers for each in answer.rejected[:most]))


def _on_one_kind(job: JobSpec, part: Cluster, limit: int) -> Answer:
    """The layouts on these nodes alone, with stages marked accordingly."""
    answer = search(job, part, engine_on(part.machine), limit)
    plans = tuple(replace(plan, spec=_placed(plan.spec, part)) for plan in answer.plans)
    where = f"among layouts on {part.type} alone"
    rejected = (Rejected(_placed(each.spec, part), f"{where}: {each.reason}") for each in answer.rejected)
    return Answer(plans, tuple(rejected))


def _placed(spec: JobSpec, part: Cluster) -> JobSpec:
    types = (part.type,) * spec.layout.pipeline
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update={"stage_accelerators": types})})


def _over_several(job: JobSpec, cluster: Cluster, limit: int, known: Sequence[Plan]) -> list[Plan]:
    """The fastest layouts over several kinds, as far as they can compete with `known`. The lowest bounds come first:
    frames by a bound for their layers, then the layouts in them, then these with their layers shared out, then with
    everything else in a step; only these last ones are simulated."""
    rates = _Rates(job, cluster.parts)
    seconds = sorted(plan.time.seconds for plan in known)
    several: list[Plan] = []
    enough: set[_Mixed] = set()
    number = count()  # of equal bounds the first one added comes first
    waiting: list[tuple[float, int, _Frame | _Mixed | _Stages | _Step]] = [
        (rates.min_seconds_of_frame(frame), next(number), frame)
        for frame in _frames(job, cluster.parts)
        if all(no_products(job, cluster.parts[part]) is None for part in frame.order)
    ]
    heapq.heapify(waiting)
    complete = _is_complete(job, cluster.parts)
    in_vain, patience = 0, math.inf if complete else MAX_FAILED_TRIES
    while waiting and in_vain < patience:
        least, _, at = heapq.heappop(waiting)
        worst = seconds[limit - 1] if len(seconds) >= limit else math.inf
        if SLACK * least > worst:
            break
        if isinstance(at, _Frame):
            for mixed in _layouts(job, at, complete):
                heapq.heappush(waiting, (rates.balanced_seconds(mixed), next(number), mixed))
        elif isinstance(at, _Mixed):
            stages = _Stages(job, at, rates)
            if stages.counts is not None:
                heapq.heappush(waiting, (stages.min_seconds, next(number), stages))
        elif at.mixed.recomputing_nothing in enough:
            continue  # the same layout with less recomputation fits
        elif isinstance(at, _Stages):
            step = at.step(cluster)
            if step is not None:
                heapq.heappush(waiting, (step.min_seconds, next(number), step))
        else:
            plan = _fitted(cluster, at, worst)
            in_vain = in_vain + 1 if plan is None else 0
            if plan is not None:
                enough.add(at.mixed.recomputing_nothing)
                several.append(plan)
                seconds = sorted([*seconds, plan.time.seconds])
    return several


class _Rates:
    """How fast layers are on each part of a cluster."""

    def __init__(self, job: JobSpec, parts: Sequence[Cluster]):
        self._job = job
        self.timed = [Bounds(job, part, engine_on(part.machine)) for part in parts]
        self._updates: dict[tuple[int, int, int, int, int], float] = {}

    def balanced_seconds(self, mixed: _Mixed) -> float:
        """Lower bound: the layers, if they could be divided so that no stage waits for another, and the update, times
        the wait for the slowest replica."""
        frame, m = mixed.frame, mixed.shape.micro_batches(self._job)
        rate = sum(n / self._seconds(part, mixed.shape) for part, n in zip(frame.order, frame.stages, strict=True))
        update = min(self._update(part, mixed.shape, n) for part, n in zip(frame.order, frame.stages, strict=True))
        slowest = min(slowest_of(frame.data, self.timed[part].cluster) for part in frame.order)
        return (m * self._job.model.layers / rate + update) * slowest

    def _update(self, part: int, shape: Candidate, stages: int) -> float:
        """Lower bound for the update, with `stages` stages on that part."""
        key = part, shape.tensor, shape.pipeline, shape.data, stages
        if key not in self._updates:
            self._updates[key] = self.timed[part].min_update_seconds(shape, stages)
        return self._updates[key]

    def min_seconds_of_frame(self, frame: _Frame) -> float:
        """Lower bound for all layouts of the frame."""
        return min(self.balanced_seconds(_Mixed(frame, shape)) for shape in _shapes(self._job, frame))

    def message(self, part: int, other: int, shape: Candidate) -> float:
        """Lower bound for a message between two stages."""
        between = max(self.timed[each].message(shape, same_node=False) for each in (part, other))
        if part != other or 2 * shape.tensor > self.timed[part].cluster.gpus_per_node:
            return between
        return min(self.timed[part].message(shape, same_node=True), between)

    def _seconds(self, part: int, shape: Candidate) -> float:
        of = self.timed[part].passes(shape).times_of
        return of(2).seconds - of(1).seconds


def _is_complete(job: JobSpec, parts: Sequence[Cluster]) -> bool:
    """Whether every size is looked at: with more kinds there are more orders, and more sizes of each."""
    return len(parts) == 2 and sum(part.gpus for part in parts) * job.model.layers <= COMPLETE


def _frames(job: JobSpec, parts: Sequence[Cluster]) -> Iterator[_Frame]:
    """Every order of two or three parts, with every size of the axes that there is room for."""
    complete, (fewest, allowed) = _is_complete(job, parts), replicas_allowed(job)
    batch, longest = job.train.global_batch_size, min(job.model.layers, max_stages(job))
    for kinds in range(2, min(MAX_IN_A_PIPELINE, len(parts)) + 1):
        for order in permutations(range(len(parts)), kinds):
            chosen = [parts[part] for part in order]
            for tensor in range(1, min(part.gpus_per_node for part in chosen) + 1):
                if job.model.heads % tensor or job.model.ffn_size % tensor:
                    continue
                groups = [part.nodes * (part.gpus_per_node // tensor) for part in chosen]
                for data in _data_sizes(fewest, min(*groups, allowed), batch, complete):
                    for stages in product(*(_stage_counts(most // data, complete) for most in groups)):
                        if sum(stages) <= longest:
                            yield _Frame(order, stages, tensor, data)


def _shapes(job: JobSpec, frame: _Frame) -> Iterator[Candidate]:
    """The simplest layout for each micro-batch size."""
    for micro_batch in micro_batch_sizes(job, -(-job.train.global_batch_size // frame.data)):
        yield Candidate(sum(frame.stages), frame.tensor, frame.data, 1, SIMPLEST, micro_batch, RECOMPUTE[0])


def _layouts(job: JobSpec, frame: _Frame, complete: bool) -> Iterator[_Mixed]:
    p = sum(frame.stages)
    for shape in _shapes(job, frame):
        whole = job.train.global_batch_size % (frame.data * p * shape.micro_batch) == 0
        for (schedule, chunks), dropped in product(schedules(job.model.layers, p, whole, complete), RECOMPUTE):
            if complete or chunks in FEW_CHUNKS:
                yield _Mixed(frame, shape._replace(schedule=schedule, virtual_stages=chunks, recompute=dropped))


def _data_sizes(fewest: int, most: int, batch: int, complete: bool) -> list[int]:
    """Numbers of replicas; on large clusters only those that divide the batch, and the largest."""
    if complete or most < fewest:
        return list(range(fewest, most + 1))
    return sorted({most, *(size for size in divisors(batch) if fewest <= size <= most)})


def _stage_counts(most: int, complete: bool) -> list[int]:
    """Numbers of stages on one part; on large clusters only all that there is room for, or half of them."""
    return list(range(1, most + 1)) if complete else sorted({most, max(1, most // 2)})


class _Stages:
    """The virtual stages of one layout, with its layers shared out, and what their passes take."""

    def __init__(self, job: JobSpec, mixed: _Mixed, rates: _Rates, room: Sequence[int] | None = None):
        """`room`: most layers of each rank."""
        self.mixed, self._job, self._rates = mixed, job, rates
        shape, parts = mixed.shape, mixed.frame.part_of_stage
        self._chunks = chunks_of(shape.schedule, shape.pipeline, shape.virtual_stages)
        self._part = {index: part for part, own in zip(parts, self._chunks, strict=True) for index in own}
        self._messages = [rates.message(part, other, shape) for part, other in pairwise(parts)]
        self.counts = self._shared_out(room)
        """Layers of each virtual stage, so that the slowest rank is as fast as possible; None if there is no room for
        all."""

    def _shared_out(self, room: Sequence[int] | None) -> Counts | None:
        parts = {part: self._rates.timed[part].parts(self.mixed.shape) for part in self.mixed.frame.order}
        last = len(self._part) - 1
        besides = {0: parts[self._part[0]][1], last: parts[self._part[last]][2]}
        costs = [(parts[self._part[index]][0], besides.get(index, 0.0)) for index in range(last + 1)]
        return shared_out(self._job.model.layers, self._chunks, costs, room)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Layers of each rank."""
        return rank_totals(self.counts or (), self.mixed.shape.pipeline, self.mixed.shape.schedule)

    @property
    def min_seconds(self) -> float:
        """Lower bound for a step: of its pipeline, times the wait for the slowest replica."""
        timed, frame = self._rates.timed, self.mixed.frame
        return self.min_pipeline_seconds() * min(slowest_of(frame.data, timed[part].cluster) for part in frame.order)

    def min_pipeline_seconds(self) -> float:
        """Lower bound for the pipeline."""
        shape = self.mixed.shape
        return min_pipeline_seconds(
            shape.schedule, self._chunks, list(self._times()), self._messages, shape.micro_batches(self._job)
        )

    def _times(self) -> Iterator[StageTimes]:
        behind, last = 0, len(self._part) - 1
        for index, layers in enumerate(self.counts or ()):
            behind += layers
            timed, own = self._rates.timed[self._part[index]], range(behind - layers, behind)
            yield timed.passes(self.mixed.shape).times(own, index == 0, index == last)

    def step(self, cluster: Cluster) -> _Step | None:
        """A step of this layout; None if the rules forbid it."""
        parts = [cluster.parts[part] for part in self.mixed.frame.part_of_stage]
        spec = self.mixed.shape.spec(self._job)
        stages = {"stage_layers": self.counts, "stage_accelerators": tuple(part.type for part in parts)}
        spec = spec.model_copy(update={"parallel": spec.layout.model_copy(update=stages)})
        return None if find_problems(spec) else _Step(self, MixedStepModel(spec, cluster), parts)

    def with_room(self, room: Sequence[int]) -> _Stages:
        """Stages of this layout with at most `room` layers on each rank."""
        return _Stages(self._job, self.mixed, self._rates, room)


@dataclass(frozen=True)
class _Step:
    stages: _Stages
    model: MixedStepModel
    parts: Sequence[Cluster]
    """The nodes of each stage."""

    @property
    def mixed(self) -> _Mixed:
        """The layout."""
        return self.stages.mixed

    @property
    def min_seconds(self) -> float:
        """Lower bound for the whole step."""
        return self.model.seconds_with(self.stages.min_pipeline_seconds())


def _fitted(cluster: Cluster, step: _Step, worst: float) -> Plan | None:
    """The plan of this layout, with as many layers on each stage as there is room for; None if there is not enough
    room, or it takes longer than `worst`."""
    most = [step.model.spec.model.layers] * step.mixed.shape.pipeline
    while step.model.time().seconds <= worst:  # moving layers away from where they are fastest makes it slower still
        held = by_kind(step.model.spec, step.parts)
        full = [memory.rank for memory, usable in held if memory.total > usable]
        if not full:
            return plan_of(step.model.spec, cluster, time=step.model.time(), memory=rank_with_least_room(held)[0])
        for rank in full:
            most[rank] = step.stages.ranks[rank] - 1
        stages = step.stages.with_room(most)
        shared_out = None if stages.counts is None else stages.step(cluster)
        if shared_out is None:
            return None
        step = shared_out
    return None
