"""Zero-bubble pipelining (Qi et al., arXiv:2401.10241): in the memory of 1F1B (ZB-H1, section 2.1), in twice that
(ZB-H2, section 2.2), and over two chunks a rank that form a V (ZB-V, section 6). Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manta.workers.schedules.one_forward_one_backward import alternate, one_forward_one_backward
from manta.workers.schedules.schedule import Action, Kind, Schedule, of_all


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


def zero_bubble_h2(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B with twice the warm-up, in which rank r does the weights' half 2 r micro-batches later.

    The warm-up's forwards fill the bubble at the start, the deferred weights' halves the one at the end. The engine
    does not run it, since its first rank holds 2p - 1 micro-batches where that of 1F1B and ZB-H1 holds p. It exists for
    comparing its time with the others.
    """
    passes = alternate(of_all("forward", micro_batches), of_all("backward", micro_batches), 2 * (stages - rank - 1))
    return with_late_weights(passes, 2 * rank, micro_batches)


ZERO_BUBBLE_H2 = Schedule(name="zb-h2", passes=zero_bubble_h2, splits_backward=True, runs=False)


_HALVES: tuple[Kind, Kind, Kind] = ("forward", "backward_input", "backward_weight")


def zero_bubble_v(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """No bubble if forward and both halves of backward take equally long.

    Chunk 0 runs from the first rank to the last, chunk 1 back. A rank holds at most 2 x `stages` chunk activations.
    Designed for at least the 2 x `stages` - 1 micro-batches that fill the pipeline; with fewer, passes are left out.
    """
    left = {(kind, chunk): iter(of_all(kind, micro_batches, chunk)) for kind in _HALVES for chunk in range(2)}
    for each in _passes(rank, stages, max(micro_batches, 2 * stages - 1)):
        action = next(left[each], None)
        if action is not None:
            yield action


def _passes(rank: int, stages: int, micro_batches: int) -> Iterator[tuple[Kind, int]]:
    """(kind, chunk) of every pass of a rank under ZB-V; each kind takes a chunk's micro-batches in order."""
    forward, backward, weight = _HALVES
    behind = stages - rank
    # Warm-up: forwards alone, until the first micro-batch comes back from the last rank, then until its gradient does.
    yield from [(forward, 0)] * (2 * behind - 1)
    yield from [(forward, 1), (forward, 0)] * rank
    yield from [(forward, 1), (backward, 1), (weight, 1)] * behind
    # Steady: every pass of both chunks in turn, as long as there are micro-batches left to go forward.
    steady = [(kind, chunk) for chunk in range(2) for kind in _HALVES]
    new = micro_batches - (2 * stages - 1 - rank)
    yield from steady * new
    yield from steady[1:] * (micro_batches - stages - new)
    # Cool-down: the weights' halves are delayed if that lets gradients leave earlier, and fill the end.
    yield from [(backward, 0), (backward, 1)] * rank
    yield from [(backward, 0), (weight, 0)] * behind
    yield from [(weight, 1)] * rank
    yield from [(weight, 0)] * rank


def forwards(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Forwards of both chunks of ZB-V: chunk 0 until the first micro-batch is back on this rank, then in turn."""
    ahead = min(2 * (stages - rank) - 1, micro_batches)
    for index in range(micro_batches + ahead):
        if index >= ahead:
            yield Action("forward", index - ahead, 1)
        if index < micro_batches:
            yield Action("forward", index, 0)


ZERO_BUBBLE_V = Schedule(
    name="zb-v", passes=zero_bubble_v, forwards=forwards, virtual_stages=2, turns_back=True, splits_backward=True
)
