"""Event simulation of a schedule: the time of each pass, given the durations of passes and messages. Pure Python.

Each rank runs its passes in order, each as soon as its input is there. A message delays only the pass that waits for
it, never its sender, and finds its buffer posted. Cost and bubble rate are those of arXiv:2401.10241, section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from manta.workers.parallel.pipeline.schedules.action import COMPUTE, Action
from manta.workers.parallel.pipeline.stages import ChunkLocation, neighbours, virtual_stage


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How long one micro-batch takes, seconds. Passes: on a whole rank, of whose v chunks each takes 1/v."""

    forward: float
    backward_input: float
    """The half of the backward pass that computes gradients of activations."""
    backward_weight: float
    """The half that computes gradients of weights. A full backward pass takes both."""
    communication: float = 0.0
    """One message. Its size and time do not depend on the number of chunks (arXiv:2104.04473, 2.2.2)."""
    share: tuple[float, ...] | None = None
    """For each virtual stage, the time of its passes relative to an even division of the model; None: all are 1."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every pass of a step runs."""

    passes: list[list[tuple[Action, float, float]]]
    """For each rank its compute in order: action, start and end, seconds from the start of the step."""

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


def simulate(lists: list[list[Action]], kind: str, virtual_stages: int, times: PassTimes) -> Timeline:
    """Time `lists`, the actions of every rank, with the chunks placed as schedule `kind` places them.

    Raises ValueError where passes can never run.
    """
    stages = len(lists)
    share = times.share or (1.0,) * (stages * virtual_stages)
    if len(share) != stages * virtual_stages:
        raise ValueError(f"share has {len(share)} values for {stages * virtual_stages} virtual stages")
    chunks: dict[ChunkLocation, _Chunk] = {}
    for rank in range(stages):
        for chunk in range(virtual_stages):
            part = share[virtual_stage(kind, stages, virtual_stages, rank, chunk)] / virtual_stages
            before, following = neighbours(kind, stages, virtual_stages, rank, chunk)
            chunks[rank, chunk] = _Chunk(before, following, _seconds(times, part))
    ranks = [_Rank(rank, [action for action in lists[rank] if action.kind in COMPUTE]) for rank in range(stages)]
    ends: dict[tuple[bool, ChunkLocation, int], float] = {}
    moved = True
    while moved:
        moved = False
        for each in ranks:
            moved |= each.advance(chunks, ends, times.communication)
    for each in ranks:
        if len(each.done) < len(each.todo):
            raise ValueError(f"rank {each.rank} waits for ever for the input of {each.todo[len(each.done)]}")
    return Timeline([each.done for each in ranks])


def _seconds(times: PassTimes, part: float) -> dict[str, float]:
    """Seconds of each kind of pass on a chunk that is `part` of a whole rank."""
    whole = {
        "forward": times.forward,
        "backward": times.backward_input + times.backward_weight,
        "backward_input": times.backward_input,
        "backward_weight": times.backward_weight,
    }
    return {kind: seconds * part for kind, seconds in whole.items()}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk's inputs come from, and how long its passes take."""

    before: ChunkLocation | None
    following: ChunkLocation | None
    seconds: dict[str, float]


@dataclass(slots=True)
class _Rank:
    """Progress of a rank."""

    rank: int
    todo: list[Action]
    now: float = 0.0
    done: list[tuple[Action, float, float]] = field(default_factory=list)

    def advance(
        self,
        chunks: dict[ChunkLocation, _Chunk],
        ends: dict[tuple[bool, ChunkLocation, int], float],
        communication: float,
    ) -> bool:
        """Run passes until one must wait; returns whether any was run. `ends`: by (is forward, place, micro-batch)."""
        count = len(self.done)
        while len(self.done) < len(self.todo):
            action = self.todo[len(self.done)]
            place = (self.rank, action.chunk)
            chunk = chunks[place]
            start = self.now
            is_forward = action.kind == "forward"
            source = chunk.before if is_forward else chunk.following
            if action.kind != "backward_weight" and source is not None:
                ready = ends.get((is_forward, source, action.micro_batch))
                if ready is None:
                    break
                start = max(start, ready + (communication if source[0] != self.rank else 0.0))
            self.now = start + chunk.seconds[action.kind]
            self.done.append((action, start, self.now))
            if action.kind != "backward_weight":
                ends[is_forward, place, action.micro_batch] = self.now
        return len(self.done) > count
