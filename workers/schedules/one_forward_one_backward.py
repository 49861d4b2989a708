"""1F1B with a flush, interleaved 1F1B (Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2), and the pattern
that others build on. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manta.workers.schedules.schedule import Action, Schedule, forwards_by_groups, of_all


def one_forward_one_backward(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """At most `stages - rank` micro-batches in flight."""
    return alternate(of_all("forward", micro_batches), of_all("backward", micro_batches), stages - rank - 1)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


ONE_FORWARD_ONE_BACKWARD = Schedule(name="1f1b", passes=one_forward_one_backward)


def interleaved(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """`stages` micro-batches through one chunk, then the next; with one chunk, 1F1B."""
    if virtual_stages == 1:
        return one_forward_one_backward(rank, stages, virtual_stages, micro_batches)
    order = list(forwards_by_groups(rank, stages, virtual_stages, micro_batches))
    of_chunks = [of_all("backward", micro_batches, chunk) for chunk in reversed(range(virtual_stages))]
    backwards = [of_chunks[action.chunk][action.micro_batch] for action in order]
    return alternate(order, backwards, 2 * (stages - rank - 1) + (virtual_stages - 1) * stages)


INTERLEAVED = Schedule(name="interleaved", passes=interleaved, virtual_stages=None, in_groups=True)
