"""Event simulation of a pipeline whose stages differ, over the schedules that the engine runs. Pure Python.

`workers.parallel.pipeline.schedules.simulate` times one kind of stage with messages that never block; here every
virtual stage has times of its own, and messages may take the time of both their ends. Where both apply they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from workers.parallel.pipeline.schedules import schedule
from workers.parallel.pipeline.schedules.action import COMPUTE
from workers.parallel.pipeline.stages import place, virtual_stage


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one virtual stage."""

    forward: float
    backward_input: float
    """The half of backward that makes gradients of activations, with what is recomputed."""
    backward_weight: float


@dataclass(frozen=True)
class Pipeline:
    """A step's pipeline on one replica."""

    kind: str
    stages: int
    virtual_stages: int
    times: tuple[StageTimes, ...]
    """Of each virtual stage, in the model's order."""
    messages: tuple[float, ...]
    """Seconds of a message from each virtual stage to the one behind it, and back."""
    blocking: bool
    """Whether a message takes the time of both ends: then no other pass, and no other message, runs there."""

    def seconds(self, micro_batches: int) -> float:
        """From the first start to the last end. Beyond a few times as many micro-batches as stages every further one
        takes equally long, so that not all are simulated."""
        more = 2 * self.stages
        few = 4 * self.stages + micro_batches % self.stages
        if micro_batches <= few + more:
            return self._makespan(micro_batches)
        first, second = self._makespan(few), self._makespan(few + more)
        return first + (second - first) * (micro_batches - few) / more

    def _makespan(self, micro_batches: int) -> float:
        return max(end for _, end in self.simulated(micro_batches))

    def work(self, micro_batches: int) -> float:
        """Most seconds that any rank computes in the step, messages that block not counted."""
        return max(self.rank_work()) * micro_batches

    def rank_work(self) -> list[float]:
        """Seconds that each rank computes for one micro-batch."""
        total = [0.0] * self.stages
        for index, each in enumerate(self.times):
            rank, _ = place(self.kind, self.stages, self.virtual_stages, index)
            total[rank] += each.forward + each.backward_input + each.backward_weight
        return total

    def simulated(self, micro_batches: int) -> list[tuple[float, float]]:
        """When each rank's first pass begins and its last one, with its message, ends."""
        ranks = _orders(self.kind, self.stages, self.virtual_stages, micro_batches)
        count = len(self.times)
        seconds = {
            "forward": [each.forward for each in self.times],
            "backward": [each.backward_input + each.backward_weight for each in self.times],
            "backward_input": [each.backward_input for each in self.times],
            "backward_weight": [each.backward_weight for each in self.times],
        }
        arriving, leaving = self._occupied()
        # When the pass of each micro-batch on each virtual stage is done: [forward or not][virtual stage].
        done: list[list[dict[int, float]]] = [[{} for _ in range(count)] for _ in range(2)]
        now, reached, begins = [0.0] * self.stages, [0] * self.stages, [-1.0] * self.stages
        moved = True
        while moved:
            moved = False
            for rank, passes in enumerate(ranks):
                at, clock = reached[rank], now[rank]
                while at < len(passes):
                    kind, index, micro_batch = passes[at]
                    forward = kind == "forward"
                    source = index - 1 if forward else index + 1
                    if kind != "backward_weight" and 0 <= source < count:
                        ready = done[forward][source].get(micro_batch)
                        if ready is None:
                            break
                        delay = 0.0 if self.blocking else arriving[forward][index]
                        clock = max(clock, ready + delay)
                        if self.blocking:
                            clock += arriving[forward][index]
                    if begins[rank] < 0:
                        begins[rank] = clock
                    clock += seconds[kind][index]
                    if kind != "backward_weight":
                        done[forward][index][micro_batch] = clock
                        if self.blocking:
                            clock += leaving[forward][index]
                    at += 1
                moved |= at > reached[rank]
                reached[rank], now[rank] = at, clock
        assert all(at == len(passes) for at, passes in zip(reached, ranks, strict=True))
        return list(zip(begins, now, strict=True))

    def _occupied(self) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds of the message that comes into, and that leaves, each virtual stage: [forward or not][index]. None
        passes between virtual stages of the same rank."""
        count = len(self.times)
        ranks = [place(self.kind, self.stages, self.virtual_stages, index)[0] for index in range(count)]
        between = [self.messages[i] if ranks[i] != ranks[i + 1] else 0.0 for i in range(count - 1)]
        before, behind = [0.0, *between], [*between, 0.0]
        return [behind, before], [before, behind]


@lru_cache(maxsize=64)
def _orders(
    kind: str, stages: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """For each rank its passes in order: what, on which virtual stage, of which micro-batch."""
    return tuple(
        tuple(
            (action.kind, virtual_stage(kind, stages, virtual_stages, rank, action.chunk), action.micro_batch)
            for action in actions
            if action.kind in COMPUTE
        )
        for rank, actions in enumerate(schedule(kind, stages, virtual_stages, micro_batches))
    )
