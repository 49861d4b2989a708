"""The fastest layouts of a job on a cluster, and why the others are not among them. Pure Python.

Candidates are examined in the order of their lower bounds: each is checked against the rules, its memory is counted and
its step simulated, until the next bound is too high to be among the best. The result is the same as that of trying all
of them. A candidate's bound is only computed if its work alone, spread evenly over all ranks, is not already too long.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from manta.service.planner.bounds import SLACK, Bounds
from manta.service.planner.candidates import RECOMPUTE, SIMPLEST, Candidate, axes, candidates, micro_batch_sizes
from manta.service.planner.hardware import GIB, Cluster, UnknownMachine, parts_of
from manta.service.planner.memory import Fit, fits, tightest, usable_bytes, worst_rank
from manta.service.planner.software import MANTA, Software, engine_on
from manta.service.planner.stage_shares import FEW_STAGES, moves
from manta.service.planner.step_time import StepTime, step_model, threads_in
from manta.workers.accounting.device_bytes import DeviceBytes
from manta.workers.accounting.flops import StepFlops, step_flops
from manta.workers.config import JobSpec
from manta.workers.spec.rules import find_problems

MAX_REJECTED = 20
MIN_REFINED = 5
"""Fewest layouts whose layers are then moved between stages. With a fixed minimum, the best layout does not depend on
how many are asked for; a few more are kept, since one of them may become faster than these by moving layers."""
MIN_EXTRA_CANDIDATES, EXTRA_CANDIDATES_BY_LAYERS = 2, 100
"""How many more are kept: at least 2, and 100 over the model's layers, since with fewer layers one is a larger part of
a stage."""
MAX_MISSING = 0.25
"""Largest part of a device's memory that may be missing with even stages for uneven ones to be tried: beyond it another
stage would get so many more layers that recomputing is faster."""
MAX_TRIES = 3
"""Most lists that are tried for one layout: the memory of one more layer is not the same for each list."""
MAX_MOVES = 4
"""Most layers that are moved one after the other; after sharing them out by time, more than two moves are hardly ever
needed."""


@dataclass(frozen=True)
class Plan:
    """A layout that fits, and the time of its step."""

    spec: JobSpec
    """The job with the layout and the micro-batch size."""
    time: StepTime
    memory: DeviceBytes
    """Of the rank that needs most."""
    peak_flops: float
    """Peak rate of one rank at the job's precision."""

    @property
    def flops(self) -> StepFlops:
        """FLOPs of a step."""
        return step_flops(self.spec)

    def rate(self, flops: float) -> float:
        """FLOP/s of a device that does its share of `flops` in a step."""
        return flops / self.spec.layout.world_size / self.time.seconds


@dataclass(frozen=True)
class Rejected:
    """A layout that is not among the best, and why."""

    spec: JobSpec
    reason: str


@dataclass(frozen=True)
class Answer:
    """Result of a search."""

    plans: tuple[Plan, ...]
    """Best first."""
    rejected: tuple[Rejected, ...]
    """For each tensor and pipeline size without a plan, the layout that came nearest."""


def plan_of(
    spec: JobSpec,
    cluster: Cluster,
    software: Software | None = None,
    time: StepTime | None = None,
    memory: DeviceBytes | None = None,
) -> Plan:
    """The plan of a job with a layout, whether it fits or not. `software`: by default this engine; `time`, `memory`: if
    already known. Raises UnknownMachine if the layout asks for nodes that the cluster does not have."""
    peaks = [peak_of_rank(spec, part) for part in parts_of(spec, cluster)]
    time = time or step_model(spec, cluster, software).time()
    return Plan(spec, time, memory or tightest(spec, cluster)[0], sum(peaks) / len(peaks))


def peak_of_rank(spec: JobSpec, part: Cluster) -> float:
    """Peak FLOP/s of a rank on these nodes, which its MFU refers to, counted like the engine: its device's by the data
    sheet, or a core's for each of its threads."""
    machine, device, is_wide = part.machine, part.machine.accelerator, spec.train.precision == "fp32"
    if machine.core is not None:
        return machine.core.product_rate(4 if is_wide else 2) * threads_in(spec, part)
    return device.peak_fp32 if is_wide else device.peak_16bit


def evaluate(spec: JobSpec, cluster: Cluster, software: Software | None = None) -> Answer:
    """The plan of a job whose layout is given, or why it has none."""
    problem = placement_problem(spec, cluster)
    if problem is None:
        fit = fits(spec, cluster)
        problem = None if fit.fits else f"does not fit: {fit}"
    if problem is not None:
        return Answer((), (Rejected(spec, problem),))
    return Answer((plan_of(spec, cluster, software),), ())


def placement_problem(spec: JobSpec, cluster: Cluster) -> str | None:
    """Why a layout cannot be placed on these nodes, regardless of memory; None if it can."""
    try:
        parts = Counter(parts_of(spec, cluster))
    except UnknownMachine as error:
        return str(error)
    if spec.layout.stage_accelerators is None:
        problems = [no_products(spec, part) for part in cluster.parts]
        problems.append(_no_room(spec, cluster.parts, spec.layout.pipeline))
    else:
        problems = [no_products(spec, part) or _no_room(spec, (part,), stages) for part, stages in parts.items()]
    return next((problem for problem in problems if problem is not None), None)


def no_products(spec: JobSpec, cluster: Cluster) -> str | None:
    machine = cluster.machine
    if spec.train.fp8 == "off" or not machine.has_gpus or machine.accelerator.peak_8bit is not None:
        return None
    name = machine.accelerator.name
    return f"train.fp8 needs GPUs of Ada, Hopper or Blackwell, and {name} has no 8-bit matmuls: set train.fp8: off"


def _no_room(spec: JobSpec, parts: Sequence[Cluster], stages: int) -> str | None:
    """Why there is no room for `stages` stages on these nodes; None if there is."""
    layout = spec.layout
    groups = sum(part.nodes * (part.gpus_per_node // layout.tensor) for part in parts)
    needed = stages * layout.data * layout.context
    if needed <= groups:
        return None
    kinds = [(part, "" if part.type is None else f" with {part.type}") for part in parts]
    nodes = " and ".join(f"{_count(part.nodes, 'node')}{typed} of {part.gpus_per_node}" for part, typed in kinds)
    places, has = "GPU" if parts[0].machine.has_gpus else "slot", "has" if sum(p.nodes for p in parts) == 1 else "have"
    return (
        f"needs {_count(needed * layout.tensor, places)} in groups of {layout.tensor} on one node; {nodes} {has} room "
        f"for {_count(groups, 'such group')}, not {needed}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def search(
    job: JobSpec,
    cluster: Cluster,
    software: Software = MANTA,
    limit: int = 5,
    ranks: int | None = None,
) -> Answer:
    """The `limit` fastest layouts that the rules allow and that fit, over tensor, pipeline, virtual stages, data,
    micro-batch, recomputation and schedule; only those of `ranks` ranks, if that is given. Deterministic: of equally
    fast layouts the simpler one comes first."""
    problem = no_products(job, cluster)
    if problem is not None:
        return Answer((), tuple(Rejected(each.spec(job), problem) for each in islice(candidates(job, cluster), 1)))
    bounds, usable = Bounds(job, cluster, software), usable_bytes(cluster)
    no_state: dict[tuple[int, int], tuple[float, Candidate]] = {}
    left: list[Candidate] = []
    for candidate in candidates(job, cluster):
        if ranks is not None and candidate.ranks != ranks:
            continue
        least = bounds.min_bytes(candidate)
        left += with_room(candidate, least, bounds, usable)
        if least > usable and _is_better(no_state, candidate, least) and not find_problems(candidate.spec(job)):
            _keep_best(no_state, candidate, least)
    best = fastest(left, bounds, limit)
    for least, candidate in no_state.values():
        _keep_best(best.too_large, candidate, least)
    plans = best.plans()
    _exclude_slower(best, bounds, {(plan.spec.layout.tensor, plan.spec.layout.pipeline) for plan in plans})
    rejected = tuple(_rejected(job, cluster, plans, best))
    return Answer(plans, rejected if plans or rejected else _without_layout(job, cluster))


def _without_layout(job: JobSpec, cluster: Cluster) -> tuple[Rejected, ...]:
    """Why the rules leave no layout: what the smallest one breaks."""
    least = min(micro_batch_sizes(job, 1))
    spec = Candidate(1, 1, job.elastic.min_data or 1, 1, SIMPLEST, least, "full").spec(job)
    broken = [f"{problem.path}: {problem.rule}" for problem in find_problems(spec) if problem.path != "data"]
    problem = placement_problem(spec, cluster) or next(iter(broken), None)
    return () if problem is None else (Rejected(spec, problem),)


def with_room(candidate: Candidate, least: float, bounds: Bounds, usable: float) -> Iterator[Candidate]:
    """The candidate, which takes `least` bytes, if these are not more than the `usable` bytes of a device; otherwise
    those under ZeRO 2 and 3 that may fit."""
    if least <= usable:
        yield candidate
    else:
        yield from (each for each in candidate.sharded_further if bounds.min_bytes(each) <= usable)


def fastest(left: Iterable[Candidate], bounds: Bounds, limit: int, most: float = math.inf) -> Best:
    """The `limit` fastest of these layouts that the rules allow and that fit, with even stages or others, if they take
    less than `most` seconds. `bounds`: may come from a search on more or fewer of the same nodes, to reuse its
    results."""
    job, usable = bounds.job, usable_bytes(bounds.cluster)
    best = Best(limit, most, max(MIN_EXTRA_CANDIDATES, EXTRA_CANDIDATES_BY_LAYERS // job.model.layers))
    no_room = []
    waiting = [_waiting(bounds.work_seconds(each), each, False) for each in left]
    heapq.heapify(waiting)
    while waiting and SLACK * waiting[0][0] <= best.most:
        *_, candidate, is_least = heapq.heappop(waiting)
        if not is_least:
            for least, each in bounds.with_min_seconds(candidate):
                heapq.heappush(waiting, _waiting(least, each, True))
            continue
        if candidate.recomputing_nothing in best.enough:
            continue  # the same layout with less recomputation fits
        spec = candidate.spec(job)
        if find_problems(spec):
            continue
        memory = bounds.memory(candidate)
        if memory.total <= usable:
            best.add(candidate, _planned(candidate, bounds))
        else:
            _keep_best(best.too_large, candidate, memory.total)
            no_room.append((candidate, memory.total))
            for further in candidate.sharded_further:
                heapq.heappush(waiting, _waiting(bounds.min_seconds(further), further, True))
    best.waiting, best.sufficient_by_then = waiting, frozenset(best.enough)
    for candidate, needed in no_room:
        other = fitted(candidate, needed, bounds, usable, best.most)
        if other is not None:
            best.add(other, _planned(other, bounds))
    for seconds, candidate in best.found():
        other = refined(candidate, seconds, bounds, usable)
        if other != candidate:
            best.add(other, _planned(other, bounds))
    return best


def fitted(
    candidate: Candidate, needed: float, bounds: Bounds, usable: float, max_seconds: float = math.inf
) -> Candidate | None:
    """`candidate`, a rank of which needs `needed` bytes with only `usable` available, with fewer layers where there is
    too little room; None if that does not help, or if its lower bound is above `max_seconds`."""
    if candidate.pipeline == 1 or needed > (1 + MAX_MISSING) * usable:
        return None
    if SLACK * bounds.min_seconds_uneven(candidate) > max_seconds:
        return None
    machine, room = bounds.cluster.machine, list(bounds.room(candidate, usable))
    if sum(room) < bounds.job.model.layers:  # it is an estimate, which may be one layer too small
        room = [most + 1 for most in room]
    for _ in range(MAX_TRIES):
        counts = bounds.shared_out(candidate, room)
        if counts is None:
            return None
        other = candidate._replace(stage_layers=counts)
        if SLACK * bounds.min_seconds(other) > max_seconds:
            return None
        worst = worst_rank(other.spec(bounds.job), machine)
        if worst.total <= usable:
            return other
        room[worst.rank] = min(room[worst.rank], bounds.layers_of_rank(other, worst.rank)) - 1
    return None


def refined(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> Candidate:
    """`candidate`, whose step takes `seconds`, with single layers moved to other stages as long as that is faster and
    fits."""
    if candidate.pipeline == 1:
        return candidate
    for _ in range(MAX_MOVES):
        moved = _best_move(candidate, seconds, bounds, usable)
        if moved is None:
            break
        candidate, seconds = moved
    return candidate


def _best_move(candidate: Candidate, seconds: float, bounds: Bounds, usable: float) -> tuple[Candidate, float] | None:
    now, even = bounds.counts(candidate), bounds.counts(candidate.even)
    # If simulations take long, only those that must be faster by their bound are simulated.
    most = seconds if len(now) <= FEW_STAGES else bounds.min_seconds(candidate)
    faster = []
    for counts in moves(now):
        other = candidate._replace(stage_layers=() if counts == even else counts)
        if bounds.min_seconds(other) < SLACK * most:
            moved_seconds = bounds.time(other).seconds
            if moved_seconds < SLACK * seconds:
                faster.append((moved_seconds, other))
    for moved_seconds, other in sorted(faster):
        if worst_rank(other.spec(bounds.job), bounds.cluster.machine).total <= usable:
            return other, moved_seconds
    return None


_Waiting = tuple[float, int, Candidate, bool]
"""An entry of the queue: seconds (its order), then a tie-break, the layout, and whether the seconds are its exact
bound."""


def _waiting(seconds: float, candidate: Candidate, is_least: bool) -> _Waiting:
    """An entry of the queue. Of equal bounds, less recomputation comes first (they are equal if nothing has a
    backward): if it fits, the others are skipped."""
    return seconds, RECOMPUTE.index(candidate.recompute), candidate, is_least


def _planned(candidate: Candidate, bounds: Bounds) -> Plan:
    spec, time, memory = candidate.spec(bounds.job), bounds.time(candidate), bounds.memory(candidate)
    return plan_of(spec, bounds.cluster, bounds.software, time=time, memory=memory)


def _exclude_slower(best: Best, bounds: Bounds, chosen: Collection[tuple[int, int]]) -> None:
    """Of layouts that are not among the best, which may have the least of their tensor and pipeline sizes: its least is
    noted, until as many sizes have theirs as are reported. `chosen`: sizes that have a plan."""
    settled: set[tuple[int, int]] = set()
    for seconds, _, candidate, is_least in sorted(best.waiting):
        key = candidate.tensor, candidate.pipeline
        if key in chosen:
            continue
        nearest = best.slower.get(key)
        if nearest is not None and nearest[0] < seconds:
            settled.add(key)
            if len(settled) == MAX_REJECTED:
                return
            continue
        for least, each in [(seconds, candidate)] if is_least else bounds.with_min_seconds(candidate):
            is_least = _is_better(best.slower, each, least) and each.recomputing_nothing not in best.sufficient_by_then
            if is_least and not find_problems(each.spec(bounds.job)):
                _keep_best(best.slower, each, least)


class Best:
    """The fastest layouts so far, each with its fastest stages, and the best of the others."""

    def __init__(self, limit: int, most: float, more: int):
        """`most`: seconds that all of them must stay below; `more`: how many are kept beyond those asked for."""
        self.limit, self._kept = limit, max(limit, MIN_REFINED) + more
        self._found: dict[Candidate, tuple[float, Candidate, Plan]] = {}
        self.most = most
        """A layout that takes longer is not among them."""
        self.enough: set[tuple[Candidate, bool]] = set()
        """Layouts that fit, as they are without recomputation."""
        self.waiting: list[_Waiting] = []
        """Layouts that were not looked at, as others are faster; `sufficient_by_then`: what was enough at that time."""
        self.sufficient_by_then: frozenset[tuple[Candidate, bool]] = frozenset()
        self.slower: dict[tuple[int, int], tuple[float, Candidate]] = {}
        self.too_large: dict[tuple[int, int], tuple[float, Candidate]] = {}
        """For each tensor and pipeline size, the layout that came nearest to fitting."""

    def add(self, candidate: Candidate, plan: Plan) -> None:
        """Add a layout that fits."""
        seconds = float(f"{plan.time.seconds:.9g}")  # the last bits are of rounding and decide nothing
        self.enough.add(candidate.recomputing_nothing)
        if seconds >= self.most or (candidate.size in self._found and self._found[candidate.size][0] <= seconds):
            return
        self._found[candidate.size] = seconds, candidate, plan
        ordered = self._ordered()
        for slow, worse, _ in ordered[self._kept :]:
            del self._found[worse.size]
            _keep_best(self.slower, worse, slow)
        if len(ordered) >= self._kept:
            self.most = ordered[self._kept - 1][0]

    def _ordered(self) -> list[tuple[float, Candidate, Plan]]:
        """Best first; of equal ones the simpler first."""
        return sorted(self._found.values(), key=lambda each: each[:2])

    def found(self) -> list[tuple[float, Candidate]]:
        """The layouts whose layers may still be moved, best first."""
        return [(seconds, candidate) for seconds, candidate, _ in self._ordered()]

    def plans(self) -> tuple[Plan, ...]:
        """The fastest layouts; the others are noted as slower."""
        for slow, worse, _ in self._ordered()[self.limit :]:
            _keep_best(self.slower, worse, slow)
        return tuple(plan for *_, plan in self._ordered()[: self.limit])


_Least = dict[tuple[int, int], tuple[float, Candidate]]
"""For each tensor and pipeline size, the lowest value so far and its layout."""


def _is_better(of: _Least, candidate: Candidate, value: float) -> bool:
    key = candidate.tensor, candidate.pipeline
    return key not in of or (value, candidate) < of[key]


def _keep_best(of: _Least, candidate: Candidate, value: float) -> None:
    """Store `candidate` if its value is the lowest of its tensor and pipeline size."""
    if _is_better(of, candidate, value):
        of[candidate.tensor, candidate.pipeline] = value, candidate


def _rejected(job: JobSpec, cluster: Cluster, plans: Iterable[Plan], best: Best) -> list[Rejected]:
    """The fastest of the others first, then those that come nearest to fitting."""
    chosen = {(plan.spec.layout.tensor, plan.spec.layout.pipeline) for plan in plans}
    least = min((plan.time.seconds for plan in plans), default=0.0)
    answers = []
    for key, (seconds, candidate) in sorted(best.slower.items(), key=lambda item: item[1]):
        if key not in chosen:
            reason = f"at least {seconds:.3g} s per step, {seconds / least:.2f} times the best"
            answers.append(Rejected(candidate.spec(job), reason))
    for key, (_, candidate) in sorted(best.too_large.items(), key=lambda item: item[1]):
        if key not in chosen and key not in best.slower and len(answers) < MAX_REJECTED:
            spec = candidate.spec(job)
            answers.append(
                Rejected(spec, f"does not fit: {Fit(worst_rank(spec, cluster.machine), usable_bytes(cluster))}")
            )
    return answers[:MAX_REJECTED]


def smallest_cluster(job: JobSpec, cluster: Cluster) -> str | None:
    """A sentence saying how many nodes the job would fit on; None if no number of them suffices, or if there are nodes
    of several kinds."""
    if cluster.others or no_products(job, cluster) is not None:
        return None
    for times in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        larger = Cluster(cluster.machine, cluster.nodes * times, cluster.gpus_per_node)
        bounds, usable = Bounds(job, larger, engine_on(larger.machine)), usable_bytes(larger)
        for tensor, pipeline, data, context in axes(job, larger):
            least = min(micro_batch_sizes(job, 1))
            plain = Candidate(pipeline, tensor, data, 1, SIMPLEST, least, "full", context=context)
            for candidate in (plain, *plain.sharded_further):
                if bounds.min_bytes(candidate) > usable or find_problems(spec := candidate.spec(job)):
                    continue
                if worst_rank(spec, larger.machine).total <= usable:
                    per_rank = f"{usable / GIB:.0f} GiB per rank"
                    return f"{larger.nodes} nodes of {larger.gpus_per_node} ({per_rank}) would be enough"
    return None
