"""1F1B with a flush (Narayanan et al., arXiv:2104.04473, section 2.2.1), and the pattern that others build on. Pure
Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manta.workers.schedules.schedule import Action, Schedule, of_all


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
