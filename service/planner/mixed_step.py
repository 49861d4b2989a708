"""The step of a job whose pipeline stages are on several kinds of nodes. Pure Python.

Each stage is timed as if the whole job ran on nodes of that kind. Work that all ranks do at the end of a step takes as
long as on the slowest kind.
"""

from __future__ import annotations

from collections import Counter

from service.planner.communication import Group, reduce_seconds
from service.planner.hardware import Cluster, parts_of
from service.planner.operations import Budget
from service.planner.software import Software, engine_on
from service.planner.step_time import StepModel
from workers.accounting.flops import padded_vocabulary, trained_parameters
from workers.config import JobSpec
from workers.parallel.pipeline.stages import ends_share_rank
from workers.spec.parameters import TOKEN_EMBEDDING, frozen_names


class _Part(StepModel):
    """The stages on nodes of one kind."""

    def whole_model(self) -> tuple[Budget, Budget, Budget] | None:
        """None: another part has the other stages."""
        return None


class MixedStepModel(StepModel):
    """The step of one job on a cluster of unequal nodes; the spec says where its stages are."""

    def __init__(self, spec: JobSpec, cluster: Cluster):
        """Raises UnknownMachine if a stage is on GPUs that the cluster does not have."""
        layout = spec.layout
        types = layout.stage_accelerators or ()
        parts: dict[str, StepModel] = {}
        most: dict[str, int] = {}
        for type, trained in zip(types, trained_parameters(spec), strict=True):
            most[type] = max(1, trained, most.get(type, 0))
        for type, part in zip(types, parts_of(spec, cluster), strict=True):
            if type not in parts:
                own = {"pipeline": Counter(types)[type], "stage_layers": None, "stage_accelerators": None}
                alone = spec.model_copy(update={"parallel": layout.model_copy(update=own)})
                parts[type] = _Part(alone, part, engine_on(part.machine), parameters=most[type])
        self._stages = [parts[type] for type in types]
        self._parts = list(parts.values())
        slowest = max(self._parts, key=lambda each: each.passes.forward.seconds)
        super().__init__(spec, slowest.cluster, slowest.software, slowest.passes, slowest.parameters)

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
        return part.message(sum(each is part for each in self._stages[: min(here, there)]))

    def first_wait(self) -> float:
        """None: the first rank waits for the others anyway."""
        return 0.0

    def gradient_seconds(self, backward: float) -> float:
        """The part of the reduction over replicas that nothing hides, where that takes longest."""
        return max(each.gradient_seconds(backward) for each in self._parts)

    def optimizer_seconds(self) -> float:
        """The update and its distribution to all replicas, where that takes longest."""
        return max(each.optimizer_seconds() for each in self._parts)

    def tied_seconds(self) -> float:
        """Summing the gradients of an embedding that two stages on different nodes share."""
        layout, model = self.spec.layout, self.spec.model
        if not model.tie_embeddings or ends_share_rank(layout) or TOKEN_EMBEDDING in frozen_names(self.spec):
            return 0.0
        elements = padded_vocabulary(self.spec) // layout.tensor * model.hidden_size
        ends = self._stages[0], self._stages[-1]
        return max(reduce_seconds(Group(2, 1), each.cluster, elements * each.software.gradient_bytes) for each in ends)


def step_model(spec: JobSpec, cluster: Cluster, software: Software | None = None) -> StepModel:
    """The step of a job, whatever nodes its layout asks for. `software`: by default this engine. Raises UnknownMachine
    if the cluster has no such nodes."""
    part, *others = parts_of(spec, cluster)
    if any(other is not part for other in others):
        return MixedStepModel(spec, cluster)
    if cluster.others and spec.layout.stage_accelerators is None:  # it may run on any of them
        models = (StepModel(spec, each, software or engine_on(each.machine)) for each in cluster.parts)
        return max(models, key=lambda model: model.time().seconds)
    return StepModel(spec, part, software or engine_on(part.machine))
