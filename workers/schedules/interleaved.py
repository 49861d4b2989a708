"""Interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.2). Pure Python."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.schedules.one_forward_one_backward import alternate, one_forward_one_backward
from manta.workers.schedules.schedule import Action, Schedule, forwards_by_groups, of_all


def interleaved(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """`stages` micro-batches through one chunk, then the next; with one chunk, 1F1B."""
    if virtual_stages == 1:
        return one_forward_one_backward(rank, stages, virtual_stages, micro_batches)
    order = list(forwards_by_groups(rank, stages, virtual_stages, micro_batches))
    of_chunks = [of_all("backward", micro_batches, chunk) for chunk in reversed(range(virtual_stages))]
    backwards = [of_chunks[action.chunk][action.micro_batch] for action in order]
    return alternate(order, backwards, 2 * (stages - rank - 1) + (virtual_stages - 1) * stages)


INTERLEAVED = Schedule(name="interleaved", passes=interleaved, virtual_stages=None, in_groups=True)
