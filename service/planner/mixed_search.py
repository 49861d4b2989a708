"""The fastest layouts of a job on a cluster of unequal nodes. Pure Python.

Besides all layouts on the nodes of one kind alone there are those whose pipeline goes over several: its first stages on
nodes of one kind, those behind them on nodes of another, with fewer layers where these are slower. All replicas are cut
alike, and tensor groups have one size everywhere, since that is what the engine runs. Layers are shared out so that the
stage that takes longest takes the least, within what each stage's memory holds; then the step is simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, permutations, product

from service.planner.bounds import SLACK, Bounds
from service.planner.candidates import (
    COMPLETE,
    MOST_STAGES,
    RECOMPUTE,
    Candidate,
    micro_batch_sizes,
    rank_totals,
    schedules,
)
from service.planner.hardware import Cluster
from service.planner.memory import by_kind, least_to_spare
from service.planner.mixed_step import MixedStepModel
from service.planner.pipeline import StageTimes
from service.planner.search import MOST_REJECTED, Answer, Plan, Rejected, no_products, plan_of, search
from service.planner.software import engine_on
from service.planner.stage_shares import Counts, chunks_of, shared_out
from service.planner.step_time import slowest_of
from workers.config import JobSpec
from workers.spec.divisors import divisors
from workers.spec.rules import find_problems

MOST_IN_A_PIPELINE = 3
"""Kinds of nodes that one goes over."""
MOST_IN_VAIN = 100
"""Layouts of a large cluster that are simulated, one after the other, without one that is among the best."""


@dataclass(frozen=True)
class _Frame:
    """Axes that find room on several kinds of nodes."""

    order: tuple[int, ...]
    """Which parts of the cluster, in the pipeline's order."""
    stages: tuple[int, ...]
    """How many are on each."""
    tensor: int
    data: int

    @property
    def part_of_stage(self) -> list[int]:
        """The part that each stage is on."""
        return [part for part, count in zip(self.order, self.stages, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class _Mixed:
    """A layout in such a frame."""

    frame: _Frame
    shape: Candidate

    @property
    def recomputing_nothing(self) -> _Mixed:
        """The same that keeps everything."""
        return replace(self, shape=replace(self.shape, recompute="none"))


def best_layouts(job: JobSpec, cluster: Cluster, limit: int = 5) -> Answer:
    """The `limit` fastest layouts that the rules allow and that fit, on whatever nodes there are."""
    if cluster.others:
        return search_mixed(job, cluster, limit)
    return search(job, cluster, engine_on(cluster.machine), limit)


def search_mixed(job: JobSpec, cluster: Cluster, limit: int = 5) -> Answer:
    """The `limit` fastest layouts on the nodes of one kind, or over several. Deterministic."""
    answers = [_on_one_kind(job, part, limit) for part in cluster.parts]
    plans = sorted((plan for answer in answers for plan in answer.plans), key=lambda each: each.time.seconds)[:limit]
    found = sorted([*plans, *_over_several(job, cluster, limit, plans)], key=lambda each: each.time.seconds)[:limit]
    most = MOST_REJECTED // len(answers)
    return Answer(tuple(found), tuple(each for answer in answers for each in answer.rejected[:most]))


def _on_one_kind(job: JobSpec, part: Cluster, limit: int) -> Answer:
    """The layouts on these nodes alone, which say so."""
    answer = search(job, part, engine_on(part.machine), limit)
    plans = tuple(replace(plan, spec=_placed(plan.spec, part)) for plan in answer.plans)
    rejected = (Rejected(_placed(each.spec, part), f"on {part.type} alone: {each.reason}") for each in answer.rejected)
    return Answer(plans, tuple(rejected))


def _placed(spec: JobSpec, part: Cluster) -> JobSpec:
    types = (part.type,) * spec.layout.pipeline
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update={"stage_accelerators": types})})


def _over_several(job: JobSpec, cluster: Cluster, limit: int, known: Sequence[Plan]) -> list[Plan]:
    """The fastest over several kinds, as far as they can be among the best beside `known`. What takes least comes
    first: frames by what their layers take at least, then the layouts in them, then these with their layers shared out,
    which alone are simulated."""
    rates = _Rates(job, cluster.parts)
    seconds = sorted(plan.time.seconds for plan in known)
    found: list[Plan] = []
    enough: set[_Mixed] = set()
    number = count()  # between equals the one that came first
    waiting: list[tuple[float, int, _Frame | _Mixed | _Stages]] = [
        (rates.least_of_frame(frame), next(number), frame)
        for frame in _frames(job, cluster.parts)
        if all(no_products(job, cluster.parts[part]) is None for part in frame.order)
    ]
    heapq.heapify(waiting)
    complete = _is_complete(job, cluster.parts)
    in_vain, patience = 0, math.inf if complete else MOST_IN_VAIN
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
            counts = stages.shared_out()
            if counts is not None:
                heapq.heappush(waiting, (stages.least_seconds(counts), next(number), stages))
        elif at.mixed.recomputing_nothing not in enough:  # else the same that recomputes less fits
            plan = _fitted(job, cluster, at, worst)
            in_vain = in_vain + 1 if plan is None else 0
            if plan is not None:
                enough.add(at.mixed.recomputing_nothing)
                found.append(plan)
                seconds = sorted([*seconds, plan.time.seconds])
    return found


class _Rates:
    """How fast layers are on each part of a cluster."""

    def __init__(self, job: JobSpec, parts: Sequence[Cluster]):
        self._job = job
        self.timed = [Bounds(job, part, engine_on(part.machine)) for part in parts]
        self._layer: dict[tuple[int, int, int, str, int], float] = {}
        self._messages: dict[tuple[int, int, int], tuple[float, float]] = {}

    def balanced_seconds(self, mixed: _Mixed) -> float:
        """Of the layers alone, if they could be cut so that no stage waits for another."""
        frame, m = mixed.frame, mixed.shape.micro_batches(self._job)
        rate = sum(n / self._seconds(part, mixed.shape, m) for part, n in zip(frame.order, frame.stages, strict=True))
        return m * self._job.model.layers / rate

    def least_of_frame(self, frame: _Frame) -> float:
        """The least of those of its layouts."""
        return min(self.balanced_seconds(_Mixed(frame, shape)) for shape in _shapes(self._job, frame))

    def message(self, part: int, other: int, shape: Candidate) -> float:
        """Least of a message between two stages."""
        inside, between = self._messages_of(part, shape)
        if part != other:
            return max(between, self._messages_of(other, shape)[1])
        return min(inside, between) if 2 * shape.tensor <= self.timed[part].cluster.gpus_per_node else between

    def _messages_of(self, part: int, shape: Candidate) -> tuple[float, float]:
        """On one node, and between two."""
        key = part, shape.tensor, shape.micro_batch
        if key not in self._messages:
            model = self.timed[part].model(shape)
            self._messages[key] = model.message_to(same_node=True), model.message_to(same_node=False)
        return self._messages[key]

    def _seconds(self, part: int, shape: Candidate, micro_batches: int) -> float:
        """Of one layer."""
        counted = micro_batches if self.timed[part].software.counts_kernels else 0
        key = part, shape.tensor, shape.micro_batch, shape.recompute, counted
        if key not in self._layer:
            of = self.timed[part].stage
            self._layer[key] = of(shape, 2).seconds - of(shape, 1).seconds
        return self._layer[key]


def _is_complete(job: JobSpec, parts: Sequence[Cluster]) -> bool:
    """Whether every size is looked at: the more kinds there are, the more orders and sizes of each."""
    return len(parts) == 2 and sum(part.gpus for part in parts) * job.model.layers <= COMPLETE


def _frames(job: JobSpec, parts: Sequence[Cluster]) -> Iterator[_Frame]:
    """Every order of two or three parts, with every size of the axes that finds room there."""
    complete = _is_complete(job, parts)
    for kinds in range(2, min(MOST_IN_A_PIPELINE, len(parts)) + 1):
        for order in permutations(range(len(parts)), kinds):
            chosen = [parts[part] for part in order]
            for tensor in range(1, min(part.gpus_per_node for part in chosen) + 1):
                if job.model.heads % tensor or job.model.ffn_size % tensor:
                    continue
                groups = [part.nodes * (part.gpus_per_node // tensor) for part in chosen]
                for data in _data_sizes(min(groups), job.train.global_batch_size, complete):
                    for stages in product(*(_stage_counts(most // data, complete) for most in groups)):
                        if sum(stages) <= min(job.model.layers, MOST_STAGES):
                            yield _Frame(order, stages, tensor, data)


def _shapes(job: JobSpec, frame: _Frame) -> Iterator[Candidate]:
    """Of every micro-batch size the simplest layout."""
    for micro_batch in micro_batch_sizes(job, -(-job.train.global_batch_size // frame.data)):
        yield Candidate(sum(frame.stages), frame.tensor, frame.data, 1, "1f1b", micro_batch, RECOMPUTE[0])


def _layouts(job: JobSpec, frame: _Frame, complete: bool) -> Iterator[_Mixed]:
    p = sum(frame.stages)
    for shape in _shapes(job, frame):
        whole = job.train.global_batch_size % (frame.data * p * shape.micro_batch) == 0
        for (schedule, chunks), dropped in product(schedules(job.model.layers, p, whole, complete), RECOMPUTE):
            yield _Mixed(frame, replace(shape, schedule=schedule, virtual_stages=chunks, recompute=dropped))


def _data_sizes(most: int, batch: int, complete: bool) -> list[int]:
    """Replicas; of large clusters those that divide the batch, and the most."""
    most = min(most, batch)
    return list(range(1, most + 1)) if complete else sorted({most, *(size for size in divisors(batch) if size <= most)})


def _stage_counts(most: int, complete: bool) -> list[int]:
    """Stages on one part; of large clusters all that find room, or half of them."""
    return list(range(1, most + 1)) if complete else sorted({most, max(1, most // 2)})


class _Stages:
    """What the virtual stages of one layout take, from how many layers each has."""

    def __init__(self, job: JobSpec, mixed: _Mixed, rates: _Rates):
        self.mixed = mixed
        self._job, self._shape = job, mixed.shape
        parts = mixed.frame.part_of_stage
        self.chunks = chunks_of(mixed.shape.schedule, mixed.shape.pipeline, mixed.shape.virtual_stages)
        self._part = {index: part for part, own in zip(parts, self.chunks, strict=True) for index in own}
        self._timed = rates.timed
        self._messages = [rates.message(part, other, mixed.shape) for part, other in pairwise(parts)]

    def _stage(self, index: int, layers: int) -> StageTimes:
        """Of a virtual stage."""
        return self._timed[self._part[index]].stage(self._shape, layers, index == 0, index == len(self._part) - 1)

    def shared_out(self, room: Sequence[int] | None = None) -> Counts | None:
        """Layers of each virtual stage, at most so many on each rank, so that the one that takes longest takes the
        least; None where there is no room for all."""
        parts = {part: self._timed[part].parts(self._shape) for part in self.mixed.frame.order}
        layer = {index: parts[part][0] for index, part in self._part.items()}
        last = len(layer) - 1
        ends = {0: parts[self._part[0]][1], last: parts[self._part[last]][2]}
        return shared_out(
            self._job.model.layers,
            self.chunks,
            lambda index, layers: layers * layer[index] + ends.get(index, 0.0),
            room,
        )

    def least_seconds(self, counts: Sequence[int]) -> float:
        """No more than the pipeline takes: every rank begins when the first micro-batch has come through the ranks
        before it and computes all of its passes; then the last one's gradients go back through them. Where the weights'
        half of backward is apart, that of as many micro-batches as ranks need not be done by then. The slowest replica
        is waited for."""
        m, apart = self._shape.micro_batches(self._job), self._shape.schedule.startswith("zb")
        times = [self._stage(index, layers) for index, layers in enumerate(counts)]
        came, back, least = 0.0, 0.0, 0.0
        for rank, (own, message) in enumerate(zip(self.chunks, [*self._messages, 0.0], strict=True)):
            busy = came + m * sum(times[index].seconds for index in own)
            late = min(m, len(self.chunks)) * sum(times[index].backward_weight for index in own) if apart else 0.0
            least = max(least, busy, busy - late + back)
            came += times[rank].forward + message
            back += message + (times[rank].backward_input if apart else times[rank].backward)
        return least * min(slowest_of(self._shape.data, self._timed[part].cluster) for part in self.mixed.frame.order)


def _fitted(job: JobSpec, cluster: Cluster, stages: _Stages, worst: float) -> Plan | None:
    """The plan of this layout with as many layers on each stage as it has room for; None where it has not, or takes
    longer than `worst`."""
    mixed = stages.mixed
    most = [job.model.layers] * mixed.shape.pipeline
    parts = [cluster.parts[part] for part in mixed.frame.part_of_stage]
    while True:
        counts = stages.shared_out(most)
        if counts is None:
            return None
        spec = _spec(job, mixed, counts, parts)
        if find_problems(spec):
            return None
        model = MixedStepModel(spec, cluster)
        if model.time().seconds > worst:  # with fewer layers where they take least it would take longer still
            return None
        held = by_kind(spec, parts)
        full = [memory.rank for memory, usable in held if memory.total > usable]
        if not full:
            return plan_of(spec, cluster, model=model, memory=least_to_spare(held)[0])
        layers = rank_totals(counts, mixed.shape.pipeline, mixed.shape.schedule)
        for rank in full:
            most[rank] = layers[rank] - 1


def _spec(job: JobSpec, mixed: _Mixed, counts: Sequence[int], parts: Sequence[Cluster]) -> JobSpec:
    spec = mixed.shape.spec(job)
    stages = {"stage_layers": tuple(counts), "stage_accelerators": tuple(part.type for part in parts)}
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update=stages)})
