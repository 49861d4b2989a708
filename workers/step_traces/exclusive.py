"""How each second of a rank's steps was spent: every moment belongs to the innermost slice that contains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workers.step_traces.assembly import nested, parents
from workers.timing.recording import Slice


def own_seconds(slices: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...], float]]:
    """Each slice, the slices around it, the outermost first, and the seconds of it that are in no slice within it."""
    known = list(slices)
    own = [each.end - each.start for each in known]
    for each, parent in zip(known, parents(known), strict=True):
        if parent is not None:
            own[parent] -= each.end - each.start
    for (each, around), seconds in zip(nested(known), own, strict=True):
        yield each, around, max(0.0, seconds)
