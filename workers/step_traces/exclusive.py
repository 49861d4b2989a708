"""Where each second of a rank's steps went: every moment belongs to the innermost slice around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workers.step_traces.assembly import nested
from workers.timing.recording import Slice


def own_seconds(slices: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...], float]]:
    """Each slice, those around it, the outermost first, and the seconds of it that are of none within it."""
    every = list(nested(slices))
    own = [each.end - each.start for each, _ in every]
    at: list[int] = []
    for index, (each, around) in enumerate(every):
        del at[len(around) :]
        if at:
            own[at[-1]] -= each.end - each.start
        at.append(index)
    for (each, around), seconds in zip(every, own, strict=True):
        yield each, around, max(0.0, seconds)
