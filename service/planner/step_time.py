"""Seconds of one optimizer step of a job on a cluster, and where they go. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.planner.communication import (
    Group,
    Groups,
    gather_seconds,
    groups_of,
    message_seconds,
    reduce_seconds,
)
from service.planner.hardware import Cluster
from service.planner.layer_time import LayerTime
from service.planner.operations import Budget, memory_seconds
from service.planner.pipeline import Pipeline, StageTimes
from service.planner.software import MANTA, Software
from workers.accounting.flops import padded_vocabulary, rank_parameters
from workers.config import JobSpec
from workers.parallel.pipeline.stages import stage_layers


@dataclass(frozen=True)
class StepTime:
    """What a step takes, by part; seconds."""

    seconds: float
    pipeline: float
    """Forwards, backwards and the waiting between them."""
    work: float
    """Of that, what the busiest stage computes."""
    gradients: float
    """Reduction over the replicas, as far as nothing hides it."""
    tied: float
    """Summing the gradients of an embedding that first and last stage share."""
    optimizer: float
    """The update, with gathering of parameters."""
    waiting: float
    """For the slowest replica."""

    @property
    def bubble_ratio(self) -> float:
        """Part of the pipeline's time in which its busiest stage waits."""
        return max(0.0, 1 - self.work / self.pipeline)


class StepModel:
    """The step of one job on one cluster."""

    def __init__(self, spec: JobSpec, cluster: Cluster, software: Software = MANTA):
        self.spec, self.cluster, self.software = spec, cluster, software
        self.groups: Groups = groups_of(spec.layout, cluster, software)
        self.layer = LayerTime(spec, self.groups, software)
        self.parameters = max(rank_parameters(spec))

    def pipeline(self) -> Pipeline:
        """The pipeline, with the times of every virtual stage."""
        layout = self.spec.layout
        count = layout.pipeline * layout.virtual_stages
        host = self.cluster.machine.constants.host_seconds
        layer = self.layer
        plain = layer.forward(), layer.backward_input(), layer.backward_weight()
        ends: list[tuple[Budget, Budget, Budget]] = [(Budget(), Budget(), Budget())] * count
        ends[0] = layer.embedding_forward(), layer.embedding_backward(), Budget()
        last = layer.output_forward(), layer.output_backward(), Budget()
        ends[-1] = last if count > 1 else (ends[0][0].plus(last[0]), ends[0][1].plus(last[1]), Budget())
        times: dict[tuple[int, int], StageTimes] = {}
        stages = []
        for index in range(count):
            layers = len(stage_layers(self.spec.model.layers, count, index))
            key = layers, index if index in (0, count - 1) else -1
            if key not in times:
                whole = [
                    end.plus(each, layers).wait_for_host(host).seconds
                    for end, each in zip(ends[index], plain, strict=True)
                ]
                times[key] = StageTimes(*whole)
            stages.append(times[key])
        return Pipeline(
            layout.schedule,
            layout.pipeline,
            layout.virtual_stages,
            tuple(stages),
            tuple(self.message(index) for index in range(count - 1)),
            self.software.blocks_on_messages,
        )

    def message(self, index: int) -> float:
        """Seconds of the message from virtual stage `index` to the next."""
        layout, layer = self.spec.layout, self.layer
        size = layer.outside * layer.hidden * layer.width
        same_node = self.groups.stages_share_node(index % layout.pipeline)
        launch = 2 * self.cluster.machine.constants.host_seconds if self.software.blocks_on_messages else 0.0
        if self.software.scatters_messages and not layout.sequence_parallel_on and layout.tensor > 1:
            part = message_seconds(self.cluster, size / layout.tensor, same_node)
            return part + gather_seconds(self.groups.tensor, self.cluster, size) + launch
        return message_seconds(self.cluster, size, same_node) + launch

    def time(self) -> StepTime:
        """The whole step."""
        layout, m = self.spec.layout, self.spec.micro_batches
        pipeline = self.pipeline()
        seconds, work = pipeline.seconds(m), pipeline.work(m)
        gradients, optimizer = self._gradients(pipeline), self._optimizer()
        tied = self._tied()
        total = seconds + gradients + optimizer + tied
        # The largest of d normally distributed numbers lies about sqrt(2 ln d) deviations above their mean.
        waiting = total * self.cluster.machine.constants.spread * math.sqrt(2 * math.log(layout.data))
        return StepTime(total + waiting, seconds, work, gradients, tied, optimizer, waiting)

    def _gradients(self, pipeline: Pipeline) -> float:
        size, data = self.parameters * self.software.gradient_bytes, self.groups.data
        if self.software.shards_optimizer:
            whole = gather_seconds(data, self.cluster, size)
        else:
            whole = reduce_seconds(data, self.cluster, size)
        if not self.software.overlaps_gradients:
            return whole
        # Beside the backward of the step's last micro-batch, in which gradients become complete.
        v = pipeline.virtual_stages
        last = min(each.backward_input + each.backward_weight for each in pipeline.times) * v
        return max(0.0, whole - last)

    def _optimizer(self) -> float:
        layout, machine = self.spec.layout, self.cluster.machine
        split = layout.data if self.software.shards_optimizer and layout.zero else 1
        update = memory_seconds(machine, self.software.optimizer_bytes * self.parameters / split)
        if not self.software.shards_optimizer:
            return update
        return update + gather_seconds(self.groups.data, self.cluster, self.parameters * self.layer.width)

    def _tied(self) -> float:
        layout, model = self.spec.layout, self.spec.model
        if layout.pipeline == 1 or not model.tie_embeddings:
            return 0.0
        size = padded_vocabulary(self.spec) // layout.tensor * model.hidden_size * self.software.gradient_bytes
        ends = self.groups.stage_stride * (layout.pipeline - 1) < self.cluster.gpus_per_node
        return reduce_seconds(Group(2, 2 if ends else 1), self.cluster, size)
