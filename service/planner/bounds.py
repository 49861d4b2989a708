"""Bounds that take only a few operations per layout: the least time of its step, the least memory of its ranks, and how
its stages would share the layers by time. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from manta.service.planner.candidates import Candidate, rank_totals
from manta.service.planner.communication import groups_of
from manta.service.planner.engine_passes import layer_time
from manta.service.planner.hardware import Cluster, with_threads
from manta.service.planner.memory import layers_with_room, step_peak_on, usable_bytes, worst_rank
from manta.service.planner.pipeline import min_pipeline_seconds
from manta.service.planner.software import Software
from manta.service.planner.stage_shares import Counts, chunks_of, shared_out
from manta.service.planner.step_time import (
    StagePasses,
    StepModel,
    StepTime,
    min_backward_seconds,
    slowest_of,
    threads_in,
)
from manta.workers.accounting.activation_bytes import saved_terms
from manta.workers.accounting.device_bytes import DeviceBytes
from manta.workers.accounting.flops import ParameterCounts, parameter_counts
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import even_counts
from manta.workers.spec.parameters import (
    first_trained_layer,
    frozen_names,
    is_partly_frozen,
    layers_differ,
    padded_rows,
)

SLACK = 1 - 1e-9
"""Tolerance for rounding: bounds are summed in another order than the quantities they bound."""


_Made = TypeVar("_Made")


class Bounds:
    """Lower bounds for the seconds and bytes of candidates, computed from parts that many candidates share, and cached
    exact values where they were asked for. Nothing here depends on the number of nodes."""

    def __init__(self, job: JobSpec, cluster: Cluster, software: Software):
        self.job, self.cluster, self.software = job, cluster, software
        self._known: dict[tuple[object, ...], Any] = {}
        wish, machine = ParallelConfig() if isinstance(job.parallel, str) else job.layout, cluster.machine
        self._ends_differ = bool(machine.core or machine.gpu) or wish.gather == "beside_forward"

    def _once(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """What `make` returns, which is called only once for each key."""
        if key not in self._known:
            self._known[key] = make()
        made: _Made = self._known[key]
        return made

    def passes(self, candidate: Candidate) -> StagePasses:
        """The times of the candidate's virtual stages."""
        threads = 1 if self.cluster.machine.core is None else threads_in(candidate.spec(self.job), self.cluster)
        # The number of micro-batches matters if a pass takes longer with more of them.
        counted = candidate.micro_batches(self.job) if self.software.counts_kernels else 0

        # Where an expert group is depends on the whole layout.
        whole = candidate.spec(self.job).layout if candidate.expert > 1 else None
        expert = None if whole is None else groups_of(whole, self.cluster, self.software).expert

        def make() -> StagePasses:
            spec = candidate.on_one_stage(candidate.data if counted or whole else 1).spec(self.job)
            cluster = with_threads(self.cluster, threads)
            groups = groups_of(spec.layout, cluster, self.software)
            groups = groups if expert is None else replace(groups, expert=expert)
            return StagePasses(layer_time(spec, groups, self.software))

        return self._once(("passes", *_layer_of(candidate), threads, counted, expert), make)

    def _sizes(self, tensor: int, experts: tuple[int, int] | None = None) -> tuple[ParameterCounts, ParameterCounts]:
        """All parameters on one of `tensor` tensor ranks, and those with gradients. `experts`: number of ranks that
        they are spread over, and of tensor ranks that share each."""

        def make() -> tuple[ParameterCounts, ParameterCounts]:
            shape = self.job.model, tensor, padded_rows(self.job.vocabulary_size, tensor) // tensor
            names, lora = frozen_names(self.job), self.job.train.lora
            whole, frozen = (parameter_counts(*shape, each, lora, experts) for each in (None, names))
            return whole, whole.minus(frozen)

        return self._once(("sizes", tensor, experts), make)

    def _most_trained(self, candidate: Candidate) -> tuple[int, int]:
        """Most parameters of a rank that have gradients, at least one, and those of experts among them."""
        c = candidate
        key = "most", c.tensor, c.pipeline, c.virtual_stages, c.schedule, c.stage_layers, c.experts

        def make() -> tuple[int, int]:
            trained = self._sizes(c.tensor, c.experts)[1]
            whole, experts = (_of_ranks(c, self.counts(c), each) for each in (trained, trained.of_experts))
            return max((max(1, own), part) for own, part in zip(whole, experts, strict=True))

        return self._once(key, make)

    def min_update_seconds(self, candidate: Candidate, stages: int) -> float:
        """Lower bound for the seconds of an update and of distributing it to all replicas, if `stages` of the
        pipeline's stages are on this cluster. It holds however layers are shared out: some rank has at least the mean
        number of parameters."""
        _, trained = self._sizes(candidate.tensor, candidate.experts)
        mean = max(1, (trained.before[-1] + trained.both) // candidate.pipeline)
        experts = trained.experts[-1] // candidate.pipeline
        spec, parts = candidate._replace(pipeline=stages).spec(self.job), self.passes(candidate)
        return StepModel(spec, self.cluster, self.software, parts, (mean, experts)).optimizer_seconds()

    def min_bytes(self, candidate: Candidate) -> float:
        """Lower bound for the bytes of the rank that needs most: its state, and activations of the fewest micro-batches
        it has in flight."""
        c, width = candidate, 4 if self.job.train.precision == "fp32" else 2
        turns_back, counts = SCHEDULES[c.schedule].turns_back, self.counts(c)
        moved = 0 if self.job.train.optimizer.offload else 8 + (4 if width == 2 else 0)
        # Bytes of a parameter, and what is kept for its training.
        own = width / (c.holders if c.zero == 3 else 1)
        state = own + 4 / (c.holders if c.zero >= 2 else 1) + moved / c.holders
        of_experts = moved / c.expert_holders - moved / c.holders
        if is_partly_frozen(self.job) or layers_differ(self.job):
            return self._min_bytes_in_part(c, counts, own, state - own, of_experts)
        # If chunks turn back and there are few micro-batches, the last chunk's may be released before all of the first
        # chunk's have come.
        trained, experts = self._most_trained(c)
        most, kept = trained * state + experts * of_experts, self._kept_before(c)[1]
        in_flight = min(c.micro_batches(self.job), c.pipeline)
        if not c.stage_layers:
            layers = self.job.model.layers // len(counts) * (1 if turns_back else c.virtual_stages)
            return most + in_flight * layers * kept
        # Of unequal stages, either the first rank, which has most micro-batches, or the one with the most parameters.
        layers = counts[0] if turns_back else sum(counts[:: c.pipeline])
        sizes = self._sizes(c.tensor, c.experts)[0]
        first = _of_ranks(c, counts, sizes)[0] * state + _of_ranks(c, counts, sizes.of_experts)[0] * of_experts
        return max(first + in_flight * layers * kept, most)

    def _min_bytes_in_part(
        self, candidate: Candidate, counts: Counts, frozen: float, trained: float, of_experts: float
    ) -> float:
        """`min_bytes` with `frozen` bytes for each parameter, `trained` more for each with gradients, and `of_experts`
        more for each of these that is an expert's. The first rank has as many micro-batches in flight as there are
        ranks, each later one has one less. For schedules with several chunks only the first rank is looked at, and if
        chunks turn back only its first one."""
        whole, with_gradients = self._sizes(candidate.tensor, candidate.experts)
        before = self._kept_before(candidate)
        kept = _of_ranks(candidate, counts, ParameterCounts(before, 0, 0, 0, before))
        if SCHEDULES[candidate.schedule].turns_back:
            kept[0] = before[counts[0]]
        if candidate.virtual_stages > 1:
            kept[1:] = [0] * (candidate.pipeline - 1)
        m, p = candidate.micro_batches(self.job), candidate.pipeline
        held = whole, with_gradients, with_gradients.of_experts
        ranks = zip(*(_of_ranks(candidate, counts, each) for each in held), kept, strict=True)
        return max(
            frozen * own + trained * moved + of_experts * experts + min(m, p - rank) * bytes_kept
            for rank, (own, moved, experts, bytes_kept) in enumerate(ranks)
        )

    def _kept_before(self, candidate: Candidate) -> tuple[int, ...]:
        """Prefix sums, over layers that have a backward, of the bytes that each keeps of one full micro-batch."""

        def make() -> tuple[int, ...]:
            spec = candidate.on_one_stage().spec(self.job)
            first, layers = first_trained_layer(spec), range(spec.model.layers)
            some = layers if is_partly_frozen(spec) or layers_differ(spec) else layers[:1]
            terms = (saved_terms(spec, each, candidate.recompute) if each >= first else {} for each in some)
            return tuple(accumulate((sum(each.values()) for each in terms), initial=0))

        return self._once(("kept", *_layer_of(candidate)), make)

    def memory(self, candidate: Candidate) -> DeviceBytes:
        """Memory of the rank that needs most; if a rank does not fit, of the first such rank found."""

        def make() -> DeviceBytes:
            machine, usable, spec = self.cluster.machine, usable_bytes(self.cluster), candidate.spec(self.job)
            return worst_rank(spec, machine, usable, self._peak_like(candidate, spec))

        return self._once(("memory", candidate), make)

    def room(self, candidate: Candidate, usable: float) -> tuple[int, ...]:
        """For how many layers each pipeline rank has room in `usable` bytes."""

        def make() -> tuple[int, ...]:
            spec = candidate.spec(self.job)
            return layers_with_room(spec, usable, self.cluster.machine, self._peak_like(candidate, spec))

        return self._once(("room", candidate, usable), make)

    def _peak_like(self, candidate: Candidate, spec: JobSpec) -> StepPeak:
        """Of the first candidate whose layers allocate and free the same."""
        key = "peak", *_layer_of(candidate), SCHEDULES[candidate.schedule].splits_backward
        return self._once(key, lambda: step_peak_on(spec, self.cluster.machine))

    def time(self, candidate: Candidate) -> StepTime:
        """Time of the candidate's step."""
        return self._once(("time", candidate), lambda: self.model(candidate).time())

    def model(self, candidate: Candidate) -> StepModel:
        """The candidate's step."""
        parts, spec = self.passes(candidate), candidate.spec(self.job)
        return StepModel(spec, self.cluster, self.software, parts, self._most_trained(candidate))

    def min_seconds(self, candidate: Candidate) -> float:
        """Lower bound for the step: of its pipeline, and of what follows it."""
        return self._once(("least", candidate), lambda: self._min_seconds(candidate))

    def _min_seconds(self, candidate: Candidate) -> float:
        model, tied, optimizer = self._end_of(candidate)
        if is_partly_frozen(self.job) or layers_differ(self.job):
            pipeline, backward = self._min_seconds_in_part(candidate)
        else:
            pipeline, backward = self._min_pipeline(candidate, model)
        if self.cluster.machine.core is not None:  # where ranks share cores these may have more to do than any rank
            pipeline = max(pipeline, model.pipeline().work(candidate.micro_batches(self.job)))
        rest = model.gradient_seconds(backward) + tied + optimizer
        return (pipeline + rest) * slowest_of(candidate.data, self.cluster)

    def _end_of(self, candidate: Candidate) -> tuple[StepModel, float, float]:
        """A step that ends like this one, and the seconds of its tied gradients and of its update: the same for all
        micro-batches and recomputations, unless something of it depends on passes."""
        c = candidate
        key = "end", c.tensor, c.pipeline, c.data, c.context, c.virtual_stages, c.schedule, c.experts

        def make() -> tuple[StepModel, float, float]:
            model = self.model(c)
            return model, model.tied_seconds(), model.optimizer_seconds()

        return make() if self._ends_differ or c.zero >= 2 else self._once((*key, self._most_trained(c)), make)

    def _min_seconds_in_part(self, candidate: Candidate) -> tuple[float, float]:
        """`_min_pipeline` where layers are of several kinds."""
        built, m = self.model(candidate).pipeline(), candidate.micro_batches(self.job)
        chunks = chunks_of(built.kind, built.stages, built.virtual_stages)
        least = min_pipeline_seconds(built.kind, chunks, built.times, built.messages[: built.stages - 1], m)
        return least, min_backward_seconds(built)

    def message(self, candidate: Candidate, same_node: bool) -> float:
        """Seconds of a message between two stages, on one node or on two."""
        key = "message", candidate.tensor, candidate.context, candidate.micro_batch, same_node
        return self._once(key, lambda: self.model(candidate).message_to(same_node))

    def _min_pipeline(self, candidate: Candidate, model: StepModel) -> tuple[float, float]:
        """Lower bound for the seconds of the pipeline, and the shortest backward of a virtual stage.

        The first rank computes all of its passes. The last one begins when the first micro-batch has gone through all
        stages before it, and after it is done the last gradient has to go back through them. If the weights' half of
        backward is separate, as many of these halves as there are stages may still be open at that moment.
        """
        p, v, m = candidate.pipeline, candidate.virtual_stages, candidate.micro_batches(self.job)
        counts, parts = self.counts(candidate), self.passes(candidate)
        if p == 1:
            only = parts.times_of(counts[0], True, True)
            return m * only.seconds, only.backward
        schedule = SCHEDULES[candidate.schedule]
        first, last = parts.times_of(counts[0], first=True), parts.times_of(counts[-1], last=True)
        between = [(parts.times_of(layers), times) for layers, times in Counter(counts[1 : p - 1]).items()]
        backward = min(first.backward, last.backward)
        if p * v > 2:
            backward = min(backward, parts.times_of(min(counts[1:-1])).backward)
        message = 0.0
        ranks = p * candidate.tensor * candidate.context
        if ranks >= 16 and not model.groups.stages_share_node(0, 1):  # all of them are on two nodes
            message = self.message(candidate, same_node=False)
        there = first.forward + sum(times * each.forward for each, times in between) + (p - 1) * message
        back = first.backward_input + sum(times * each.backward_input for each, times in between) + (p - 1) * message
        late = 0.0
        if schedule.turns_back:
            turn = [parts.times_of(layers) for layers in counts[p - 1 : p + 1]]
            busy_first, busy_last = m * (first.seconds + last.seconds), m * sum(each.seconds for each in turn)
            late = min(m, p) * sum(each.backward_weight for each in turn)
        else:
            busy_first = m * (first.seconds + parts.seconds(counts[p::p]))
            busy_last = m * (last.seconds + parts.seconds(counts[p - 1 : -1 : p]))
            if schedule.splits_backward:
                late = min(m, p) * last.backward_weight
            else:
                back += first.backward_weight + sum(times * each.backward_weight for each, times in between)
        # One that is not the first begins when something has come from there.
        busy = m * parts.times_of(max(self._totals(candidate)[1:-1], default=0)).seconds + first.forward
        return max(busy_first, busy, there + busy_last, there + busy_last - late + back), backward

    def counts(self, candidate: Candidate) -> tuple[int, ...]:
        """Layers of each virtual stage."""
        even = candidate.pipeline * candidate.virtual_stages
        return candidate.stage_layers or even_counts(self.job.model.layers, even)

    def _totals(self, candidate: Candidate) -> tuple[int, ...]:
        return rank_totals(self.counts(candidate), candidate.pipeline, candidate.schedule)

    def balanced(self, candidate: Candidate) -> Candidate | None:
        """The candidate with layers shared out by the time that ranks take, if the busiest rank then has less to do
        than with even stages; else None."""
        chosen = self.shared_out(candidate) if self._can_be_balanced(candidate) else None
        return None if chosen is None or chosen == self.counts(candidate) else candidate._replace(stage_layers=chosen)

    def shared_out(self, candidate: Candidate, room: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Layers of each virtual stage, shared out by the time that ranks take; `room`: most layers of each rank."""
        p, v = candidate.pipeline, candidate.virtual_stages
        layer, first, last = self.parts(candidate)
        costs = [(layer, first), *[(layer, 0.0)] * (p * v - 2), (layer, last)]
        return shared_out(self.job.model.layers, chunks_of(candidate.schedule, p, v), costs, room)

    def layers_of_rank(self, candidate: Candidate, rank: int) -> int:
        """Number of layers of one pipeline rank."""
        return self._totals(candidate)[rank]

    def min_seconds_uneven(self, candidate: Candidate) -> float:
        """Lower bound for a step in which some rank has more layers than the mean."""
        if self.job.model.moe is not None and layers_differ(self.job):  # it may have more of the faster ones
            return self.work_seconds(candidate)
        more = self.job.model.layers // candidate.pipeline + 1
        work = candidate.micro_batches(self.job) * self.passes(candidate).times_of(more).seconds
        return (work + self.min_update_seconds(candidate, candidate.pipeline)) * slowest_of(
            candidate.data, self.cluster
        )

    def work_seconds(self, candidate: Candidate) -> float:
        """A bound no higher than `min_seconds` however layers are shared out, from parts that are already known: the
        work of all micro-batches, spread evenly over all ranks."""
        whole = self.passes(candidate).times(range(self.job.model.layers), first=True, last=True).seconds
        work = candidate.micro_batches(self.job) * whole / candidate.pipeline
        return SLACK * work * slowest_of(candidate.data, self.cluster)

    def with_min_seconds(self, candidate: Candidate) -> list[tuple[float, Candidate]]:
        """The candidate with even stages, and with balanced ones if these differ, each with its lower bound."""
        balanced = self.balanced(candidate)
        both = [candidate] if balanced is None else [candidate, balanced]
        return [(self.min_seconds(each), each) for each in both]

    def _can_be_balanced(self, candidate: Candidate) -> bool:
        """Whether another number of layers on some rank leaves the busiest one less to do."""
        p = candidate.pipeline
        if p == 1:
            return False
        totals, (layer, first, last) = self._totals(candidate), self.parts(candidate)
        ends = [first + last, 0.0] if SCHEDULES[candidate.schedule].turns_back else [first, last]
        most = SLACK * max(max(totals) * layer, totals[0] * layer + ends[0], totals[-1] * layer + ends[1])
        room = [max(0, int((most - more) / layer)) for more in (*ends, 0.0)]
        return room[0] + room[1] + (p - 2) * room[2] >= self.job.model.layers

    def parts(self, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of a layer, and of what the first and the last virtual stage have besides layers."""
        layers = max(1, self.job.model.layers // (candidate.pipeline * candidate.virtual_stages))
        stage = self.passes(candidate).times_of
        inner, ends = stage(layers).seconds, (stage(layers, first=True), stage(layers, last=True))
        more = stage(layers + 1).seconds - inner
        return more, ends[0].seconds - inner, ends[1].seconds - inner


def _layer_of(candidate: Candidate) -> tuple[object, ...]:
    """A key that is equal for candidates whose layers are."""
    c = candidate
    return c.tensor, c.context, c.method, c.micro_batch, c.recompute, c.experts


def _of_ranks(candidate: Candidate, counts: Counts, of: ParameterCounts) -> list[int]:
    """Parameters `of` on each pipeline rank."""
    stages = [b - a for a, b in pairwise(of.before[end] for end in accumulate(counts, initial=0))]
    chunks = chunks_of(candidate.schedule, candidate.pipeline, candidate.virtual_stages)
    ranks = [sum(stages[index] for index in own) for own in chunks]
    if candidate.pipeline == 1 or SCHEDULES[candidate.schedule].turns_back:
        ranks[0] += of.both
    else:
        ranks[0], ranks[-1] = ranks[0] + of.first, ranks[-1] + of.last
    return ranks
