"""Bounds that take only a few operations per layout: the least time of its step, the least memory of its ranks, and how
its stages would share the layers by time. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.service.planner.candidates import Candidate, rank_totals
from manta.service.planner.communication import groups_of
from manta.service.planner.engine_passes import layer_time
from manta.service.planner.hardware import Cluster, with_threads
from manta.service.planner.layer_kinds import FrozenSizes, StagePasses
from manta.service.planner.memory import RankMemory, layers_with_room, step_peak_on, usable_bytes, worst_rank
from manta.service.planner.pipeline import StageTimes, min_pipeline_seconds, shape_of
from manta.service.planner.software import Software
from manta.service.planner.stage_shares import chunks_of, shared_out
from manta.service.planner.step_time import StepModel, StepTime, min_backward_seconds, slowest_of, threads_in
from manta.workers.accounting.activation_bytes import saved_terms
from manta.workers.accounting.flops import ParameterCounts, parameter_counts
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import even_counts
from manta.workers.spec.parameters import padded_rows

SLACK = 1 - 1e-9
"""Tolerance for rounding: bounds are summed in another order than the quantities they bound."""


@dataclass(frozen=True)
class _End:
    """What comes behind the pipeline in a step."""

    model: StepModel
    """Of one of the steps that end like this."""
    tied: float
    optimizer: float


class Bounds:
    """Lower bounds for the seconds and bytes of candidates, computed from parts that many candidates share, and cached
    exact values where they were asked for. Nothing here depends on the number of nodes."""

    def __init__(self, job: JobSpec, cluster: Cluster, software: Software):
        self.job, self.cluster, self.software = job, cluster, software
        self._parts: dict[tuple[int, int, str, int, int], StagePasses] = {}
        self._frozen = FrozenSizes(job) if job.train.frozen else None
        self._memory: dict[Candidate, RankMemory] = {}
        self._room: dict[tuple[Candidate, float], tuple[int, ...]] = {}
        self._times: dict[Candidate, StepTime] = {}
        self._least: dict[Candidate, float] = {}
        self._layer_bytes: dict[tuple[int, int, str], int] = {}
        self._ends: dict[tuple[int, int, int, int, str, int], _End] = {}
        wish, machine = ParallelConfig() if isinstance(job.parallel, str) else job.layout, cluster.machine
        self._ends_differ = bool(machine.core or machine.gpu) or wish.gather == "beside_forward"
        self._peaks: dict[tuple[int, int, str, bool], StepPeak] = {}
        self._most: dict[tuple[int, int, int, str], int] = {}
        self._messages: dict[tuple[int, int], float] = {}

    def _parts_of(self, candidate: Candidate) -> StagePasses:
        """The times of the parts of the model."""
        threads, counted = self._threads(candidate), self._counted(candidate)
        key = candidate.tensor, candidate.micro_batch, candidate.recompute, threads, counted
        if key not in self._parts:
            spec, cluster = (
                self._alone(candidate, candidate.data if counted else 1),
                with_threads(self.cluster, threads),
            )
            layer = layer_time(spec, groups_of(spec.layout, cluster, self.software), self.software)
            self._parts[key] = StagePasses(layer)
        return self._parts[key]

    def _counted(self, candidate: Candidate) -> int:
        """Number of micro-batches if a pass takes longer with more of them; else 0."""
        return candidate.micro_batches(self.job) if self.software.counts_kernels else 0

    def _threads(self, candidate: Candidate) -> int:
        return 1 if self.cluster.machine.core is None else threads_in(candidate.spec(self.job), self.cluster)

    def _alone(self, candidate: Candidate, data: int = 1) -> JobSpec:
        """A job whose layers are those of `candidate`, on one stage."""
        return candidate.on_one_stage(data).spec(self.job)

    def _sizes_of(self, tensor: int) -> ParameterCounts:
        return parameter_counts(self.job.model, tensor, padded_rows(self.job.vocabulary_size, tensor) // tensor)

    def parameters(self, candidate: Candidate) -> int:
        """Most parameters of a rank."""
        c = candidate
        if c.stage_layers:
            return self._parameters(c)
        key = c.tensor, c.pipeline, c.virtual_stages, c.schedule
        if key not in self._most:
            self._most[key] = self._parameters(c)
        return self._most[key]

    def _parameters(self, candidate: Candidate) -> int:
        sizes, p = self._sizes_of(candidate.tensor), candidate.pipeline
        if p == 1:
            return sizes.before[-1] + sizes.both
        ranks = self._totals(candidate)
        if SCHEDULES[candidate.schedule].turns_back:
            return max(ranks[0] * sizes.before[1] + sizes.both, max(ranks) * sizes.before[1])
        ends = ranks[0] * sizes.before[1] + sizes.first, ranks[-1] * sizes.before[1] + sizes.last
        return max(*ends, max(ranks) * sizes.before[1])

    def min_update_seconds(self, candidate: Candidate, stages: int) -> float:
        """Lower bound for the seconds of an update and of distributing it to all replicas, if `stages` of the
        pipeline's stages are on this cluster. It holds however layers are shared out: some rank has at least the mean
        number of parameters."""
        if self._frozen is not None:
            trained = self._frozen.whole(candidate.tensor)
        else:
            sizes = self._sizes_of(candidate.tensor)
            trained = sizes.before[-1] + sizes.both
        mean = max(1, trained // candidate.pipeline)
        spec, parts = candidate._replace(pipeline=stages).spec(self.job), self._parts_of(candidate)
        return StepModel(spec, self.cluster, self.software, parts, mean).optimizer_seconds()

    def min_bytes(self, candidate: Candidate) -> float:
        """Lower bound for the bytes of the rank that needs most: its state, and activations of the fewest micro-batches
        it has in flight."""
        p, v = candidate.pipeline, candidate.virtual_stages
        if self._frozen is not None:
            more = self._bytes_of_state(candidate) - self._width
            return self._frozen.min_bytes(candidate, self.counts(candidate), self._width, more)
        if candidate.stage_layers:
            return self._min_bytes_of_list(candidate)
        # If chunks turn back and there are few micro-batches, the last chunk's may be released before all of the first
        # chunk's have come.
        layers = self.job.model.layers // (p * v) * (1 if SCHEDULES[candidate.schedule].turns_back else v)
        held = min(candidate.micro_batches(self.job), p) * layers
        return self._state(candidate, self.parameters(candidate)) + held * self._bytes_of_layer(candidate)

    def _min_bytes_of_list(self, candidate: Candidate) -> float:
        """`min_bytes` for unequal stages: the larger of what the first rank needs, which holds most micro-batches,
        and the state of the rank with the most parameters."""
        counts, sizes = candidate.stage_layers, self._sizes_of(candidate.tensor)
        turns_back = SCHEDULES[candidate.schedule].turns_back
        ends = sizes.both if turns_back else sizes.first
        layers = counts[0] if turns_back else sum(counts[:: candidate.pipeline])
        held = min(candidate.micro_batches(self.job), candidate.pipeline) * layers
        first = self._state(candidate, self._totals(candidate)[0] * sizes.before[1] + ends)
        most = self._state(candidate, self.parameters(candidate))
        return max(first + held * self._bytes_of_layer(candidate), most)

    def _state(self, candidate: Candidate, parameters: int) -> float:
        """Bytes of parameters, gradients and moments."""
        return parameters * self._bytes_of_state(candidate)

    def _bytes_of_state(self, candidate: Candidate) -> float:
        """Bytes of state per trained parameter."""
        moved = 0 if self.job.train.optimizer.offload else 8 + (4 if self._width == 2 else 0)
        return self._width + 4 + moved / candidate.data

    @property
    def _width(self) -> int:
        return 4 if self.job.train.precision == "fp32" else 2

    def _bytes_of_layer(self, candidate: Candidate) -> int:
        key = candidate.tensor, candidate.micro_batch, candidate.recompute
        if key not in self._layer_bytes:
            self._layer_bytes[key] = sum(saved_terms(self._alone(candidate), 0, candidate.recompute).values())
        return self._layer_bytes[key]

    def memory(self, candidate: Candidate) -> RankMemory:
        """Memory of the rank that needs most; if a rank does not fit, of the first such rank found."""
        if candidate not in self._memory:
            machine, usable, spec = self.cluster.machine, usable_bytes(self.cluster), candidate.spec(self.job)
            self._memory[candidate] = worst_rank(spec, machine, usable, self._peak_like(candidate, spec))
        return self._memory[candidate]

    def room(self, candidate: Candidate, usable: float) -> tuple[int, ...]:
        """For how many layers each pipeline rank has room in `usable` bytes."""
        key = candidate, usable
        if key not in self._room:
            machine, spec = self.cluster.machine, candidate.spec(self.job)
            self._room[key] = layers_with_room(spec, usable, machine, self._peak_like(candidate, spec))
        return self._room[key]

    def _peak_like(self, candidate: Candidate, spec: JobSpec) -> StepPeak:
        """Of the first candidate whose layers allocate and free the same."""
        splits_backward = SCHEDULES[candidate.schedule].splits_backward
        key = candidate.tensor, candidate.micro_batch, candidate.recompute, splits_backward
        if key not in self._peaks:
            self._peaks[key] = step_peak_on(spec, self.cluster.machine)
        return self._peaks[key]

    def time(self, candidate: Candidate) -> StepTime:
        """Time of the candidate's step."""
        if candidate not in self._times:
            self._times[candidate] = self.model(candidate).time()
        return self._times[candidate]

    def model(self, candidate: Candidate) -> StepModel:
        """The candidate's step."""
        parts, spec = self._parts_of(candidate), candidate.spec(self.job)
        return StepModel(spec, self.cluster, self.software, parts, self._max_trained_parameters(candidate))

    def _max_trained_parameters(self, candidate: Candidate) -> int:
        """Most parameters of a rank that have gradients."""
        if self._frozen is not None:
            return self._frozen.max_trained_parameters(candidate, self.counts(candidate))
        return self.parameters(candidate)

    def stage(self, candidate: Candidate, layers: int, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage of so many layers, as `StagePasses.times_of` has them."""
        return self._parts_of(candidate).times_of(layers, first, last)

    def stage_of(self, candidate: Candidate, layers: range, first: bool, last: bool) -> StageTimes:
        """Times of a virtual stage that has these layers of the model."""
        return self._parts_of(candidate).times(layers, first, last)

    def min_seconds(self, candidate: Candidate) -> float:
        """Lower bound for the step: of its pipeline, and of what follows it."""
        if candidate not in self._least:
            self._least[candidate] = self._min_seconds(candidate)
        return self._least[candidate]

    def _min_seconds(self, candidate: Candidate) -> float:
        end, on_cores = self._end_of(candidate), self.cluster.machine.core is not None
        if self._frozen is not None:
            pipeline, backward = self._min_seconds_in_part(candidate)
        else:
            pipeline, backward = self._min_pipeline(candidate, end.model)
        if on_cores:  # where ranks share cores these may have more to do than any rank
            pipeline = max(pipeline, end.model.pipeline().work(candidate.micro_batches(self.job)))
        rest = end.model.gradient_seconds(backward) + end.tied + end.optimizer
        return (pipeline + rest) * slowest_of(candidate.data, self.cluster)

    def _end_of(self, candidate: Candidate) -> _End:
        """What comes behind its pipeline: the same for all micro-batches and recomputations, unless something of it
        depends on passes."""
        if self._ends_differ:
            return self._end(candidate)
        c, trained = candidate, self._max_trained_parameters(candidate)
        key = c.tensor, c.pipeline, c.data, c.virtual_stages, c.schedule, trained
        if key not in self._ends:
            self._ends[key] = self._end(candidate)
        return self._ends[key]

    def _end(self, candidate: Candidate) -> _End:
        model = self.model(candidate)
        return _End(model, model.tied_seconds(), model.optimizer_seconds())

    def _min_seconds_in_part(self, candidate: Candidate) -> tuple[float, float]:
        """`_min_pipeline` where layers differ in what of them is frozen."""
        built, m = self.model(candidate).pipeline(), candidate.micro_batches(self.job)
        chunks = chunks_of(built.kind, built.stages, built.virtual_stages)
        least = min_pipeline_seconds(built.kind, chunks, built.times, built.messages[: built.stages - 1], m)
        return least, min_backward_seconds(built)

    def _min_message_seconds(self, candidate: Candidate, model: StepModel) -> float:
        """Seconds of a message between two stages, where all that follow one another are on two nodes."""
        if model.groups.stages_share_node(0, 1) or candidate.pipeline * candidate.tensor < 16:
            return 0.0
        key = candidate.tensor, candidate.micro_batch
        if key not in self._messages:
            self._messages[key] = self.model(candidate).message_to(same_node=False)
        return self._messages[key]

    def _min_pipeline(self, candidate: Candidate, model: StepModel) -> tuple[float, float]:
        """Lower bound for the seconds of the pipeline, and the shortest backward of a virtual stage.

        The first rank computes all of its passes. The last one begins when the first micro-batch has gone through all
        stages before it, and after it is done the last gradient has to go back through them. If the weights' half of
        backward is separate, as many of these halves as there are stages may still be open at that moment.
        """
        p, v, m = candidate.pipeline, candidate.virtual_stages, candidate.micro_batches(self.job)
        counts, parts = self.counts(candidate), self._parts_of(candidate)
        if p == 1:
            only = parts.times_of(counts[0], True, True)
            return m * only.seconds, only.backward
        shape, schedule = shape_of(counts, p, candidate.schedule), SCHEDULES[candidate.schedule]
        first, last = parts.times_of(counts[0], first=True), parts.times_of(counts[-1], last=True)
        between = [(parts.times_of(layers), times) for layers, times in shape.between]
        backward = min(first.backward, last.backward)
        if p * v > 2:
            backward = min(backward, parts.times_of(shape.fewest).backward)
        message = self._min_message_seconds(candidate, model)
        there = first.forward + sum(times * each.forward for each, times in between) + (p - 1) * message
        back = first.backward_input + sum(times * each.backward_input for each, times in between) + (p - 1) * message
        late = 0.0
        if schedule.turns_back:
            turn = [parts.times_of(layers) for layers in counts[p - 1 : p + 1]]
            busy_first, busy_last = m * (first.seconds + last.seconds), m * sum(each.seconds for each in turn)
            late = min(m, p) * sum(each.backward_weight for each in turn)
        else:
            busy_first = m * (first.seconds + parts.seconds(shape.with_first))
            busy_last = m * (last.seconds + parts.seconds(shape.with_last))
            if schedule.splits_backward:
                late = min(m, p) * last.backward_weight
            else:
                back += first.backward_weight + sum(times * each.backward_weight for each, times in between)
        # One that is not the first begins when something has come from there.
        busy = m * parts.times_of(shape.fullest).seconds + first.forward
        return max(busy_first, busy, there + busy_last, there + busy_last - late + back), backward

    def counts(self, candidate: Candidate) -> tuple[int, ...]:
        """Layers of each virtual stage."""
        even = candidate.pipeline * candidate.virtual_stages
        return candidate.stage_layers or even_counts(self.job.model.layers, even)

    def _totals(self, candidate: Candidate) -> tuple[int, ...]:
        """Layers of each rank."""
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
        more = self.job.model.layers // candidate.pipeline + 1
        work = candidate.micro_batches(self.job) * self.stage(candidate, more).seconds
        return (work + self.min_update_seconds(candidate, candidate.pipeline)) * slowest_of(
            candidate.data, self.cluster
        )

    def work_seconds(self, candidate: Candidate) -> float:
        """A bound no higher than `min_seconds` however layers are shared out, from parts that are already known: the
        work of all micro-batches, spread evenly over all ranks."""
        whole = self.stage_of(candidate, range(self.job.model.layers), first=True, last=True).seconds
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
        stage = self._parts_of(candidate).times_of
        inner, ends = stage(layers).seconds, (stage(layers, first=True), stage(layers, last=True))
        more = stage(layers + 1).seconds - inner
        return more, ends[0].seconds - inner, ends[1].seconds - inner
