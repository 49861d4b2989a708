"""Times of virtual stages with any number of layers, each computed once. Pure Python."""

from __future__ import annotations

from collections.abc import Collection

from service.planner.frozen_passes import FrozenPasses
from service.planner.hardware import Machine
from service.planner.passes import Passes
from service.planner.pipeline import StageTimes


class PartTimes:
    """Times of the parts of a model at one tensor size, micro-batch and recomputation."""

    def __init__(self, passes: Passes, frozen: FrozenPasses | None, machine: Machine):
        """`frozen`: the passes of its layers, with `train.frozen`."""
        self.passes, self.frozen, self._machine = passes, frozen, machine
        self._stages: dict[tuple[int, bool, bool], StageTimes] = {}

    def stage(self, layers: int, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage of `layers` layers, which may be the first or the last of the model. With
        `train.frozen` only those of its forward: the others depend on which layers it has (`FrozenPasses.times`)."""
        key = layers, first, last
        if key not in self._stages:
            passes, machine = self.passes, self._machine
            if self.frozen is not None:
                forward = passes.forward_of_stage(layers, first, last).wait_for_host(machine).seconds
                self._stages[key] = StageTimes(forward, 0.0, 0.0)
            else:
                self._stages[key] = passes.of_stage(layers, first, last, machine)
        return self._stages[key]

    def seconds(self, counts: Collection[int]) -> float:
        """Seconds of inner virtual stages with these numbers of layers, in total."""
        known = {layers: self.stage(layers).seconds for layers in set(counts)}
        return sum(map(known.__getitem__, counts))
