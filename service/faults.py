"""Faults on request, for users who want to see a job survive them: refused unless the service was started with them."""

from __future__ import annotations

from service.rank_names import no_such_rank
from workers.errors import MantaError
from workers.protocol.messages import BETWEEN_STEPS, Fault


class FaultsNotAllowed(MantaError):
    """This service does not inject faults."""

    def __init__(self) -> None:
        super().__init__("this service does not inject faults; `manta up --allow-faults` starts one that does")


class FaultNotPossible(MantaError):
    """The job cannot have this fault now; the message says why."""


def not_running(state: str) -> FaultNotPossible:
    """A job in `state` can have no fault."""
    return FaultNotPossible(f"the job is {state}, and only one that runs can have a fault")


def refuse_impossible(fault: Fault, ranks: int, step: int, steps: int) -> None:
    """Raise FaultNotPossible if `fault` could never occur in a job of `ranks` running ranks that has committed `step`
    of its `steps` steps."""
    if ranks == 0:
        raise FaultNotPossible("the job has no ranks yet; wait until it is RUNNING")
    if fault.rank >= ranks:
        raise FaultNotPossible(no_such_rank("the job", fault.rank, ranks))
    if fault.phase not in BETWEEN_STEPS and (fault.at_step > steps or step >= steps):
        raise FaultNotPossible(f"step {fault.at_step} is never begun: the job has committed {step} of {steps} steps")
    if fault.kind == "store" and ranks == 1:
        raise FaultNotPossible("a job of one rank has no rendezvous store")
