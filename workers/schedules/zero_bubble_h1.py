"""ZB-H1, zero-bubble pipelining in the memory of 1F1B (Qi et al., arXiv:2401.10241, section 2.1). Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manta.workers.schedules.one_forward_one_backward import one_forward_one_backward
from manta.workers.schedules.schedule import Action, Schedule, of_all


def zero_bubble_h1(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B in which rank r does the weights' half of backward r micro-batches later.

    Gradients therefore reach the preceding ranks sooner, no rank holds more activations than 1F1B's first rank, and the
    deferred weights' halves fill what was 1F1B's bubble at the end.
    """
    return with_late_weights(one_forward_one_backward(rank, stages, virtual_stages, micro_batches), rank, micro_batches)


def with_late_weights(actions: Iterable[Action], late: int, micro_batches: int) -> Iterator[Action]:
    """`actions`, with each backward replaced by its inputs' half; the weights' comes `late` micro-batches later."""
    inputs, weights = of_all("backward_input", micro_batches), of_all("backward_weight", micro_batches)
    for action in actions:
        if action.kind == "forward":
            yield action
            continue
        yield inputs[action.micro_batch]
        if action.micro_batch >= late:
            yield weights[action.micro_batch - late]
    yield from weights[max(0, micro_batches - late) :]


ZERO_BUBBLE_H1 = Schedule(name="zb-h1", passes=zero_bubble_h1, splits_backward=True)
