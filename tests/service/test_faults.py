"""A fault that could never strike is refused, with the reason."""

import pytest

from service.faults import FaultNotPossible, refuse_impossible
from workers.protocol.messages import Fault


def asked(kind="kill", rank=0, at_step=0, phase="data"):
    return Fault("fault_1", kind, rank, at_step, phase)


@pytest.mark.parametrize(
    ("fault", "ranks", "step", "said"),
    [
        (asked(), 0, 0, "no ranks yet"),
        (asked(rank=4), 4, 0, "no rank 4; its ranks are 0 to 3"),
        (asked(rank=1), 1, 0, "the job has no rank 1; its only rank is 0"),
        (asked(at_step=11), 4, 0, "step 11 is never begun: the job has committed 0 of 10 steps"),
        (asked(at_step=10), 4, 10, "step 10 is never begun: the job has committed 10 of 10 steps"),
        (asked("store"), 1, 0, "one rank has no rendezvous store"),
    ],
)
def test_fault_that_could_never_strike_is_refused(fault, ranks, step, said):
    with pytest.raises(FaultNotPossible, match=said):
        refuse_impossible(fault, ranks, step, 10)


@pytest.mark.parametrize(
    ("fault", "ranks", "step"),
    [
        (asked(rank=3), 4, 0),
        (asked(at_step=10), 4, 9),
        (asked(at_step=3), 4, 9),  # as soon as possible after it
        (asked(at_step=11, phase="start"), 4, 10),  # where the number of a step means nothing
        (asked(at_step=11, phase="recovery"), 4, 0),
        (asked("store"), 2, 0),
        (asked(), 1, 0),
    ],
)
def test_fault_that_may_strike_is_let_through(fault, ranks, step):
    refuse_impossible(fault, ranks, step, 10)
