"""When the passes of a pipeline of equal stages run, and what its ranks wait for: the planner's event simulation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from manta.service.planner.pipeline import Pipeline, StageTimes
from manta.workers.schedules.schedule import Action
from manta.workers.schedules.stages import chunk_location


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How long one micro-batch takes, seconds. Passes: on all chunks of a rank, each of which takes an equal part."""

    forward: float
    backward_input: float
    """The half of the backward pass that computes gradients of activations."""
    backward_weight: float
    """The half that computes gradients of weights. A full backward pass takes both."""
    communication: float = 0.0
    """One message. Its size and time do not depend on the number of chunks (arXiv:2104.04473, 2.2.2)."""

    def pipeline(
        self, kind: str, stages: int, virtual_stages: int, trains: bool = True, blocking: bool = False
    ) -> Pipeline:
        """The pipeline of schedule `kind` whose stages take these times."""
        each = (self.forward, self.backward_input, self.backward_weight)
        chunk, count = StageTimes(*(seconds / virtual_stages for seconds in each)), stages * virtual_stages
        messages = (self.communication,) * (count - 1)
        return Pipeline(kind, stages, virtual_stages, (chunk,) * count, messages, blocking, trains=trains)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every pass of a step runs."""

    passes: list[list[tuple[Action, float, float]]]
    """For each rank its compute in order: action, start and end, seconds from the start of the step."""

    @classmethod
    def of(cls, pipeline: Pipeline, micro_batches: int) -> Timeline:
        """The simulated step of `pipeline`."""
        passes: list[list[tuple[Action, float, float]]] = [[] for _ in range(pipeline.stages)]
        for bar in pipeline.bars(micro_batches):
            _, chunk = chunk_location(pipeline.kind, pipeline.stages, pipeline.virtual_stages, bar.stage)
            action = Action(bar.kind, bar.micro_batch, chunk)
            passes[bar.rank].append((action, bar.begin, bar.end))
        return cls(passes)

    @property
    def makespan(self) -> float:
        """Seconds from the first start on any rank to the last end on any."""
        return max(rank[-1][2] for rank in self.passes) - min(rank[0][1] for rank in self.passes)

    @property
    def cost(self) -> float:
        """Most seconds that a rank spends between the start of its first and the end of its last pass.

        This is the time of a step in a run of many, if ranks continue to the next without waiting for the others
        (arXiv:2401.10241, section 4).
        """
        return max(rank[-1][2] - rank[0][1] for rank in self.passes)

    @property
    def work(self) -> float:
        """Seconds that a rank computes, mean over the ranks: m (TF + TB + TW) of a training step."""
        return sum(end - start for rank in self.passes for _, start, end in rank) / len(self.passes)

    @property
    def bubble_ratio(self) -> float:
        """Part of the cost that is not work: (cost - m (TF + TB + TW)) / cost (arXiv:2401.10241, section 5.3)."""
        return (self.cost - self.work) / self.cost

    def idle(self, rank: int) -> float:
        """Seconds that `rank` waits between its first and its last pass."""
        return sum(after[1] - before[2] for before, after in pairwise(self.passes[rank]))
