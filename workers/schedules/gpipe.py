"""GPipe (Huang et al., arXiv:1811.06965, section 2.3). Pure Python."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.schedules.schedule import Action, Schedule, of_all


def gpipe(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards: every micro-batch is in flight at once."""
    yield from of_all("forward", micro_batches)
    yield from of_all("backward", micro_batches)


GPIPE = Schedule(name="gpipe", passes=gpipe, all_in_flight=True)
