"""Seconds of one optimizer step of a job on a cluster, and where they go. Pure Python.

Layers are of several kinds: with experts or without, and with `train.frozen` by which of their parameters are frozen;
with `train.lora` all are but those of adapters. Backward ends in the first layer that a gradient reaches; the layers
below only run forward. Above, frozen weights need no gradient products, sums or casts of their own; gradients still
pass through them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from manta.service.planner.communication import (
    Group,
    Groups,
    gather_seconds,
    groups_of,
    message_seconds,
    reduce_seconds,
)
from manta.service.planner.engine_passes import layer_time
from manta.service.planner.hardware import HOST_COPY, Cluster, parts_of, with_threads
from manta.service.planner.layer_time import CAST_BOTH, LayerTime
from manta.service.planner.operations import WIDE, Budget, Passes, host_wait, memory_seconds
from manta.service.planner.pipeline import Pipeline, SharedCores, StageTimes
from manta.service.planner.software import MANTA, Software, engine_on
from manta.workers.accounting.flops import trained_experts_of_rank, trained_parameters, vocabulary_rows
from manta.workers.accounting.layer_passes import in_8_bits
from manta.workers.accounting.state_costs import SLICE_ELEMENTS, bytes_per_parameter
from manta.workers.accounting.unit_bytes import gathered_elements, units_of
from manta.workers.config import JobSpec
from manta.workers.schedules.stages import chunk_location, end_ranks, layers_of
from manta.workers.spec.parameters import (
    TOKEN_EMBEDDING,
    LayerKind,
    first_trained_layer,
    frozen_names,
    is_partly_frozen,
    layer_kinds,
    layers_differ,
    layers_of_kinds,
    output_weight,
)
from manta.workers.system.threads import decided_threads


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by part."""

    seconds: float
    pipeline: float
    """Forwards, backwards and waiting between them."""
    work: float
    """The part of `pipeline` in which the busiest stage computes."""
    gradients: float
    """The part of the reduction over replicas that nothing hides."""
    tied: float
    """Summing the gradients of an embedding that the first and the last stage share."""
    optimizer: float
    """The update, including the gathering of parameters."""
    waiting: float
    """Waiting for the slowest replica."""

    @property
    def bubble_ratio(self) -> float:
        """Part of the pipeline's time in which its busiest stage waits."""
        return max(0.0, 1 - self.work / self.pipeline)


def slowest_of(replicas: int, cluster: Cluster) -> float:
    """Factor by which the slowest of the replicas is slower than the mean: the largest of n normally distributed
    numbers is about sqrt(2 ln n) deviations above their mean."""
    return 1 + cluster.machine.constants.spread * math.sqrt(2 * math.log(replicas))


def threads_in(spec: JobSpec, cluster: Cluster) -> int:
    """Threads per rank of a job that begins on this cluster (decision 0021)."""
    machine, layout = cluster.machine, spec.layout
    if machine.core is None:
        return 1
    most = layout.world_size // layout.data * (spec.elastic.max_data or layout.data)
    return decided_threads(spec, [(machine.cores, min(most, cluster.gpus_per_node))])


def most_trained(spec: JobSpec) -> tuple[int, int]:
    """Parameters that the rank with most trains, at least one, and those of experts among them."""
    each = enumerate(trained_parameters(spec))
    return max((max(1, trained), trained_experts_of_rank(spec, rank)) for rank, trained in each)


def min_backward_seconds(pipeline: Pipeline) -> float:
    """Seconds of the shortest backward of a virtual stage."""
    return min(time.backward for time in pipeline.times if time.backward > 0)


class StagePasses:
    """Times of one job's virtual stages."""

    def __init__(self, layer: LayerTime, parts: Passes | None = None):
        """`parts`: times of the parts of the model with everything trained, if they are not those of `layer`."""
        self.layer, self.parts, spec = layer, parts or layer.passes(), layer.spec
        self.is_frozen = is_partly_frozen(spec)
        """Whether a part of the model is not trained."""
        self._first, self._all = first_trained_layer(spec), layer_kinds(spec)
        self.layers_differ = layers_differ(spec)
        """Whether layers may be of several kinds."""
        whole = self.parts.forward, self.parts.backward_input, self.parts.backward_weight
        self._known: dict[LayerKind, tuple[Budget, Budget, Budget]] = {} if self.is_frozen else {self._all[0]: whole}
        self._times: dict[object, StageTimes] = {}

    def times(self, layers: range, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage with these `layers` of the model, at one end of it or both."""
        several = self.is_frozen or self.layers_differ
        kinds = (frozenset(self._kinds(layers).items()), self._forwards(layers)) if several else None
        key = len(layers), kinds, first, last
        if key not in self._times:
            self._times[key] = StageTimes(*(budget.seconds for budget in self.budgets(layers, first, last)))
        return self._times[key]

    def times_of(self, layers: int, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage with so many layers, as the mean over kinds of layers. If a part is frozen, only
        those of its forward: the others depend on which layers it has."""
        if not (self.is_frozen or self.layers_differ):
            return self.times(range(layers), first, last)
        key = layers, first, last
        if key not in self._times:
            machine, mean = self.layer.machine, self._mean
            forward = self._with_ends(Budget().plus(mean[0], layers), first, last).wait_for_host(machine)
            self._times[key] = StageTimes(forward.seconds, 0.0, 0.0)
            if not self.is_frozen:
                backward, weight = (Budget().plus(each, layers) for each in mean[1:])
                backward = backward.plus(self.parts.first_backward, first).plus(self.parts.last_backward, last)
                ends = backward.wait_for_host(machine), weight.wait_for_host(machine)
                self._times[key] = StageTimes(forward.seconds, *(each.seconds for each in ends))
        return self._times[key]

    @cached_property
    def _mean(self) -> tuple[Budget, Budget, Budget]:
        """Times of a layer, as the mean over all; of frozen parameters its forward alone."""
        total = Budget(), Budget(), Budget()
        for kind, times in self._forwards(range(len(self._all))):
            part = self._layer(kind) if not self.is_frozen else (self._forward_of(kind), Budget(), Budget())
            forward, backward, weight = (
                one.plus(other, times / len(self._all)) for one, other in zip(total, part, strict=True)
            )
            total = forward, backward, weight
        return total

    def seconds(self, counts: Collection[int]) -> float:
        """Seconds of inner virtual stages with these numbers of layers, in total."""
        known = {layers: self.times_of(layers).seconds for layers in set(counts)}
        return sum(map(known.__getitem__, counts))

    def budgets(self, layers: range, first: bool, last: bool) -> tuple[Budget, Budget, Budget]:
        """Times of a virtual stage, as in `times`, broken down by what the time goes to."""
        machine, forward, backward, weight = self.layer.machine, Budget(), Budget(), Budget()
        for kind, times in self._forwards(layers):
            forward = forward.plus(self._forward_of(kind), times)
        forward = self._with_ends(forward, first, last)
        for kind, times in self._kinds(layers).items():
            _, of_input, of_weight = self._layer(kind)
            backward, weight = backward.plus(of_input, times), weight.plus(of_weight, times)
        if first and self._first < 0:
            backward = backward.plus(self.parts.first_backward)
        if last:
            backward = backward.plus(self._last_backward)
        if machine.gpu is not None and first and last:
            forward.host = host_wait(machine, forward, backward, weight)
            return forward, backward, weight
        return forward.wait_for_host(machine), backward.wait_for_host(machine), weight.wait_for_host(machine)

    def _with_ends(self, forward: Budget, first: bool, last: bool) -> Budget:
        """A stage's forward, without waiting for the host."""
        if first:
            forward = forward.plus(self.parts.first_forward)
        return forward.plus(self.parts.last_forward) if last else forward

    def _forwards(self, layers: range) -> tuple[tuple[LayerKind, int], ...]:
        """How many of these layers are of each kind that forward distinguishes: with experts or without."""
        if not self.layers_differ:
            return ((self._all[0], len(layers)),)
        experts = sum(self._all[layer].has_experts for layer in layers)
        counts = (LayerKind(True), experts), (LayerKind(False), len(layers) - experts)
        return tuple(each for each in counts if each[1])

    def _kinds(self, layers: range) -> Mapping[LayerKind, int]:
        """Of these layers that have a backward, how many are of each kind."""
        if not (self.is_frozen or self.layers_differ):
            return {self._all[0]: len(layers)}
        return Counter(self._all[max(layers.start, self._first) : layers.stop])

    def _forward_of(self, kind: LayerKind) -> Budget:
        """The forward of a layer of this kind."""
        if kind.has_experts == self._all[self.layer.layer].has_experts:
            return self.parts.forward
        return self._layer(kind._replace(frozen=frozenset()))[0]

    def _layer(self, kind: LayerKind) -> tuple[Budget, Budget, Budget]:
        """Forward and both halves of the backward of a layer of this kind."""
        if kind not in self._known:
            number = next(layer for layer, each in enumerate(self._all) if each.has_experts == kind.has_experts)
            layer = self.layer.without(kind.frozen, number)
            if self.is_frozen:
                self._known[kind] = layer.forward(), layer.backward_input(), layer.backward_weight()
            else:
                self._known[kind] = layer.layer_passes()
        return self._known[kind]

    @cached_property
    def _last_backward(self) -> Budget:
        spec = self.layer.spec
        if not self.is_frozen:
            return self.parts.last_backward
        return self.layer.without(frozenset({output_weight(spec.model)} & frozen_names(spec))).output_backward()


class StepModel:
    """The step of one job on one cluster."""

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        software: Software = MANTA,
        passes: StagePasses | None = None,
        parameters: tuple[int, int] | None = None,
    ):
        """`passes` and `parameters` (those that the rank with most trains, and of these experts'): if known from an
        equal job."""
        self.spec, self.software = spec, software
        self.cluster = cluster = with_threads(cluster, threads_in(spec, cluster))
        self.groups: Groups = groups_of(spec.layout, cluster, software)
        self.layer = layer_time(spec, self.groups, software)
        self.passes = passes or StagePasses(self.layer)
        self.most_trained = self.parameters, self._experts = parameters or most_trained(spec)

    @property
    def _regions(self) -> tuple[tuple[int, Group], ...]:
        """Trained parameters by the ranks that hold them."""
        apart = self._experts if self.spec.layout.exchange_size > 1 else 0
        return (self.parameters - apart, self.groups.holders), (apart, self.groups.expert_holders)

    def pipeline(self) -> Pipeline:
        """The pipeline, with the times of every virtual stage."""
        layout = self.spec.layout
        layers, count = self.spec.model.layers, layout.pipeline * layout.virtual_stages
        stages = (
            self.part_of(index).passes.times(layers_of(layers, layout, index), index == 0, index == count - 1)
            for index in range(count)
        )
        return Pipeline(
            layout.schedule,
            layout.pipeline,
            layout.virtual_stages,
            tuple(stages),
            tuple(self.message(index) for index in range(count - 1)),
            self.software.blocks_on_messages,
            self.cores(),
        )

    def budgets_of(self, index: int) -> tuple[Budget, Budget, Budget]:
        """One micro-batch's passes through virtual stage `index`, broken down by what the time goes to."""
        layout, part = self.spec.layout, self.part_of(index)
        layers = layers_of(self.spec.model.layers, layout, index)
        ends = index == 0, index == layout.pipeline * layout.virtual_stages - 1
        return part.passes.budgets(layers, *ends)

    def part_of(self, index: int) -> StepModel:
        """The model of the nodes that virtual stage `index` is on; here all nodes are alike."""
        return self

    def cores(self) -> SharedCores | None:
        """The cores that the ranks share; None if each rank has a device of its own."""
        core, layout = self.cluster.machine.core, self.spec.layout
        if core is None:
            return None
        nodes = -(-layout.world_size // self.cluster.gpus_per_node)
        machine, alike = self.cluster.machine, layout.tensor * layout.holders
        return SharedCores(nodes * machine.cores, alike, core.all_busy, machine.threads)

    def _alike(self, seconds: float) -> float:
        """Seconds of work that takes each rank `seconds` alone, if all ranks do it at the same time."""
        cores = self.cores()
        return seconds if cores is None else seconds / cores.speed(self.spec.layout.pipeline)

    def message(self, index: int) -> float:
        """Seconds of the message from virtual stage `index` to the next."""
        return self.message_to(self.groups.stages_share_node(self.rank_of(index), self.rank_of(index + 1)))

    def rank_of(self, index: int) -> int:
        """The pipeline rank of virtual stage `index`."""
        layout = self.spec.layout
        return chunk_location(layout.schedule, layout.pipeline, layout.virtual_stages, index)[0]

    def message_to(self, same_node: bool) -> float:
        """Seconds of a message between stages on the same node or on two nodes."""
        layout, layer = self.spec.layout, self.layer
        size = layer.outside * layer.hidden * layer.width
        launch = 2 * self.cluster.machine.constants.host_seconds if self.software.blocks_on_messages else 0.0
        if self.software.scatters_messages and not layout.sequence_parallel_on and layout.tensor > 1:
            part = message_seconds(self.cluster, size / layout.tensor, same_node)
            return part + gather_seconds(self.groups.tensor, self.cluster, size) + launch
        return message_seconds(self.cluster, size, same_node) + launch

    def time(self) -> StepTime:
        """The whole step."""
        layout, m = self.spec.layout, self.spec.micro_batches
        pipeline = self.pipeline()
        seconds, work = pipeline.seconds(m) + self.first_wait() + self.cast_seconds(), pipeline.work(m)
        last = min_backward_seconds(pipeline)
        gradients, optimizer = self.gradient_seconds(last), self.optimizer_seconds()
        tied = self.tied_seconds()
        total = seconds + gradients + optimizer + tied
        waiting = total * (slowest_of(layout.data, self.cluster) - 1)
        return StepTime(total + waiting, seconds, work, gradients, tied, optimizer, waiting)

    def seconds_with(self, pipeline: float) -> float:
        """Seconds of the whole step, if its pipeline took `pipeline` seconds."""
        last = min_backward_seconds(self.pipeline())
        rest = self.gradient_seconds(last) + self.tied_seconds() + self.optimizer_seconds()
        return (pipeline + rest) * slowest_of(self.spec.layout.data, self.cluster)

    def first_wait(self) -> float:
        """How much longer a calibrated GPU that has the whole model waits for its host in the step's first forward than
        in others, since nothing was queued before it. If the device is the slower one from then on, that is the only
        wait."""
        budgets = self.full_model()
        if budgets is None:
            return 0.0
        return max(0.0, host_wait(self.cluster.machine, budgets[0]) - budgets[0].host)

    def cast_seconds(self) -> float:
        """With 8-bit products, the time to cast the weights of all stages: in a step's first micro-batch no stage has
        cast weights yet, and the following ones wait for it."""
        if self.spec.train.fp8 == "off":
            return 0.0
        layers = layers_of_kinds(self.spec, range(self.spec.model.layers))
        elements = sum(times * in_8_bits(self.spec, layer) for layer, times in layers)
        return memory_seconds(self.cluster.machine, CAST_BOTH * elements)

    def full_model(self) -> tuple[Budget, Budget, Budget] | None:
        """One micro-batch's passes on a calibrated GPU that has the whole model; None otherwise."""
        machine, layout = self.cluster.machine, self.spec.layout
        if machine.gpu is None or layout.pipeline * layout.virtual_stages > 1:
            return None
        return self.budgets_of(0)

    def _update_wait(self) -> float:
        """How long the device waits for its host before an update, for norm, agreement and clipping, as far as the host
        was not ahead; plus the kernels for these."""
        budgets, machine = self.full_model(), self.cluster.machine
        if budgets is None or machine.gpu is None:
            return 0.0
        operations, constants = self.software.update_operations, machine.constants
        host = sum(budget.operations for budget in budgets) * constants.host_seconds
        ahead = self.spec.micro_batches * (sum(budget.device_seconds for budget in budgets) - host)
        wait = max(0.0, operations * constants.host_seconds - max(0.0, ahead))
        return wait + operations * machine.gpu.kernel_seconds

    def gradient_seconds(self, backward: float) -> float:
        """The part of the reduction over replicas that nothing hides; `backward`: shortest of a virtual stage."""
        if self.spec.layout.zero >= 2:
            return self._alike(self._sharded_seconds(backward))
        whole, exchange = 0.0, gather_seconds if self.software.shards_optimizer else reduce_seconds
        for elements, holders in self._regions:
            if elements:
                whole += exchange(holders, self.cluster, elements * self.software.gradient_bytes)
        if not self.software.overlaps_gradients:
            return self._alike(whole)
        # Overlaps with the backward of the step's last micro-batch, in which gradients become complete.
        return max(0.0, whole - backward * self.spec.layout.virtual_stages)

    def _sharded_seconds(self, backward: float) -> float:
        """The part of the communication of ZeRO 2 and 3 that nothing hides. Every micro-batch's backward, which takes
        `backward` seconds, reduces gradients. With ZeRO 3 forward gathers the weights of all units, backward those of
        layers that are not there any more, each beside the computation of the unit before
        (`workers/accounting/unit_bytes.py`)."""
        spec, m, units = self.spec, self.spec.micro_batches, units_of(self.spec)

        def by_units(size: float) -> float:
            return len(units) * gather_seconds(self.groups.holders, self.cluster, size / len(units))

        reduce, ahead, again = by_units(self.parameters * self.software.gradient_bytes), 0.0, 0.0
        if spec.layout.zero == 3:
            in_forward = sum(unit.elements for unit in units)
            ahead = by_units(in_forward * self.layer.width)
            again = by_units((gathered_elements(spec, 1) - in_forward) * self.layer.width)
        if not self.software.overlaps_gradients:
            return m * (reduce + ahead + again)
        first = ahead / len(units)  # which nothing comes before
        return m * (first + max(0.0, ahead - first - self._forward()) + max(0.0, again + reduce - backward))

    def _update(self, parameters: float) -> float:
        """Seconds of an update of this many parameters, without any waiting."""
        machine, software, compiled = self.cluster.machine, self.software, self.spec.train.compile
        if machine.gpu is not None and not compiled:
            return software.optimizer_bytes * parameters / machine.gpu.update
        moved = software.compiled_optimizer_bytes if compiled else None
        return memory_seconds(machine, (software.optimizer_bytes if moved is None else moved) * parameters)

    def _offloaded_update(self, parameters: float) -> float:
        """Seconds of an update with offloaded state: both directions of the transfer overlap with each other and with
        updates, except for the last slice. On cores they follow one another."""
        machine, update, each = self.cluster.machine, self._update(parameters), bytes_per_parameter(self.spec)
        if not machine.has_gpus:
            return update + memory_seconds(machine, 4 * each * parameters)
        link = HOST_COPY if machine.gpu is None else machine.gpu.copy
        last = min(parameters, SLICE_ELEMENTS)
        return max(update, each * parameters / link) + each * last / link

    def optimizer_seconds(self) -> float:
        """The update and its distribution to all replicas."""
        layout = self.spec.layout
        is_split = layout.zero > 0 and self.software.shards_optimizer
        offload = self.spec.train.optimizer.offload
        ranks = (layout.holders, layout.expert_holders) if is_split else (1, 1)
        own = sum(elements / held for (elements, _), held in zip(self._regions, ranks, strict=True) if elements)
        update = (self._offloaded_update if offload else self._update)(own)
        update += self._update_wait()
        if not self.software.shards_optimizer or layout.zero == 3:
            return self._alike(update)
        # The parameters that each replica has updated, or without ZeRO the gradients that it has summed, go to all
        # others.
        width = self.layer.width if layout.zero else self.software.gradient_bytes
        gather = sum(gather_seconds(holders, self.cluster, size * width) for size, holders in self._regions if size)
        return self._alike(update + gather - (min(gather, self._forward()) if self._gather_overlaps_forward else 0.0))

    @property
    def _gather_overlaps_forward(self) -> bool:
        """Whether the gathering of updated parameters overlaps with the next step's forward."""
        layout, train = self.spec.layout, self.spec.train
        has_masters = self.layer.width < WIDE or train.optimizer.offload
        beside = layout.gather == "beside_forward" and bool(layout.zero) and has_masters
        return beside and self.software.overlaps_gradients

    def _forward(self) -> float:
        """Seconds of the first micro-batch's forward, through the fastest of all stages."""
        return min(time.forward for time in self.pipeline().times) * self.spec.layout.virtual_stages

    def tied_seconds(self) -> float:
        """Summing the gradients of an embedding that two stages hold."""
        spec, model = self.spec, self.spec.model
        if not model.tie_embeddings or len(end_ranks(spec.layout)) == 1 or TOKEN_EMBEDDING in frozen_names(spec):
            return 0.0
        return self._sum_of_tables(vocabulary_rows(spec) * model.hidden_size)

    def _sum_of_tables(self, elements: int) -> float:
        together = self.groups.stages_share_node(0, self.spec.layout.pipeline - 1)
        return reduce_seconds(Group(2, 2 if together else 1), self.cluster, elements * self.software.gradient_bytes)


class _Part(StepModel):
    """The stages on nodes of one kind."""

    def full_model(self) -> tuple[Budget, Budget, Budget] | None:
        """None: another part has the other stages."""
        return None


class MixedStepModel(StepModel):
    """The step of one job on a cluster of unequal nodes; the spec says where its stages are."""

    def __init__(self, spec: JobSpec, cluster: Cluster):
        """Raises UnknownMachine if a stage is on GPUs that the cluster does not have."""
        layout = spec.layout
        types = layout.stage_accelerators or ()
        parts: dict[str, StepModel] = {}
        most: dict[str, tuple[int, int]] = {}
        for rank, (type, trained) in enumerate(zip(types, trained_parameters(spec), strict=True)):
            own = max(1, trained), trained_experts_of_rank(spec, rank)
            most[type] = max(own, most.get(type, own))
        for type, part in zip(types, parts_of(spec, cluster), strict=True):
            if type not in parts:
                where = {"pipeline": Counter(types)[type], "stage_layers": None, "stage_accelerators": None}
                alone = spec.model_copy(update={"parallel": layout.model_copy(update=where)})
                parts[type] = _Part(alone, part, engine_on(part.machine), parameters=most[type])
        self._stages = [parts[type] for type in types]
        self._parts = list(parts.values())
        slowest = max(self._parts, key=lambda each: each.passes.parts.forward.seconds)
        super().__init__(spec, slowest.cluster, slowest.software, slowest.passes, slowest.most_trained)

    def part_of(self, index: int) -> StepModel:
        """The model of the part of the cluster that virtual stage `index` is on."""
        return self._stages[self.rank_of(index)]

    def message(self, index: int) -> float:
        """Seconds of the message from virtual stage `index` to the next; between unequal nodes, the slower end
        counts."""
        here, there = self.rank_of(index), self.rank_of(index + 1)
        part = self._stages[here]
        if part is not self._stages[there]:
            return max(self._stages[each].message_to(same_node=False) for each in (here, there))
        if abs(here - there) != 1:
            return part.message_to(same_node=False)
        return part.message(sum(stage is part for stage in self._stages[: min(here, there)]))

    def first_wait(self) -> float:
        """None: the first rank waits for the others anyway."""
        return 0.0

    def gradient_seconds(self, backward: float) -> float:
        """The part of the reduction over replicas that nothing hides, where that takes longest."""
        return max(part.gradient_seconds(backward) for part in self._parts)

    def optimizer_seconds(self) -> float:
        """The update and its distribution to all replicas, where that takes longest."""
        return max(part.optimizer_seconds() for part in self._parts)

    def _sum_of_tables(self, elements: int) -> float:
        ends = self._stages[0], self._stages[-1]
        return max(reduce_seconds(Group(2, 1), end.cluster, elements * end.software.gradient_bytes) for end in ends)


def step_model(spec: JobSpec, cluster: Cluster, software: Software | None = None) -> StepModel:
    """The step of a job, whatever nodes its layout asks for. `software`: by default this engine. Raises UnknownMachine
    if the cluster has no such nodes."""
    part, *others = parts_of(spec, cluster)
    if any(other is not part for other in others):
        return MixedStepModel(spec, cluster)
    if cluster.others and spec.layout.stage_accelerators is None:  # it may run on any of them
        models = (StepModel(spec, part, software or engine_on(part.machine)) for part in cluster.parts)
        return max(models, key=lambda model: model.time().seconds)
    return StepModel(spec, part, software or engine_on(part.machine))
