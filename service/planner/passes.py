"""One micro-batch through each part of a model, as budgets, and the times of a virtual stage made from them. Pure
Python."""

from __future__ import annotations

from dataclasses import dataclass

from service.planner.hardware import Machine
from service.planner.operations import Budget
from service.planner.pipeline import StageTimes


def host_wait(machine: Machine, *passes: Budget) -> float:
    """Seconds that a device waits for its host in these passes together, with more of them to follow: the host queues
    ahead as long as it is the faster one."""
    host = sum(each.operations for each in passes) * machine.constants.host_seconds
    return max(0.0, host - sum(each.device_seconds for each in passes))


@dataclass(frozen=True)
class Passes:
    """One micro-batch through each part of the model."""

    forward: Budget
    """Of one layer, like the next two."""
    backward_input: Budget
    backward_weight: Budget
    first_forward: Budget
    """What the first virtual stage has besides layers: the embedding."""
    first_backward: Budget
    last_forward: Budget
    """What the last virtual stage has besides layers: final norm, logits, loss."""
    last_backward: Budget

    def of_stage(self, layers: int, first: bool, last: bool, machine: Machine) -> StageTimes:
        """Times of a virtual stage with `layers` layers, at one end of the model or both."""
        return StageTimes(*(each.seconds for each in self.budgets_of_stage(layers, first, last, machine)))

    def forward_of_stage(self, layers: int, first: bool, last: bool) -> Budget:
        """The stage's forward, without waiting for the host."""
        forward = Budget().plus(self.forward, layers)
        if first:
            forward = forward.plus(self.first_forward)
        return forward.plus(self.last_forward) if last else forward

    def budgets_of_stage(self, layers: int, first: bool, last: bool, machine: Machine) -> tuple[Budget, Budget, Budget]:
        """The stage's forward and both halves of backward, broken down by what the time goes to."""
        forward, backward = self.forward_of_stage(layers, first, last), Budget().plus(self.backward_input, layers)
        if first:
            backward = backward.plus(self.first_backward)
        if last:
            backward = backward.plus(self.last_backward)
        weight = Budget().plus(self.backward_weight, layers)
        if machine.gpu is not None and first and last:
            forward.host = host_wait(machine, forward, backward, weight)
            return forward, backward, weight
        return forward.wait_for_host(machine), backward.wait_for_host(machine), weight.wait_for_host(machine)
