"""Consecutive phases, some of whose ends were not recorded. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


def intervals(began_at: float, ends: Sequence[float | None]) -> list[tuple[float, float]]:
    """Begin and end of each phase, in Unix seconds, up to the first that has not ended. `ends`: when each ended; None
    for what has not happened or is not known: a phase whose own end is not known is counted with the one that follows.
    The clocks of several machines may disagree: no phase is negative, and each begins where the previous one ended."""
    spans: list[tuple[float, float]] = []
    last = began_at
    for place, end in enumerate(ends):
        later = [known for known in ends[place:] if known is not None]
        if not later:
            break
        until = last if end is None else max(last, min(end, *later))
        spans.append((last, until))
        last = until
    return spans
