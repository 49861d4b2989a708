"""Growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator

_MOST_DOUBLINGS = 64


def growing_pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds between attempts, without end: each twice the previous one, from `first` up to `longest`."""
    pause = first
    while True:
        yield min(pause, longest)
        pause = min(2 * pause, longest)


def pause_after(tries: int, first: float, longest: float) -> float:
    """Seconds to wait after `tries` tries in vain, counted from 0, as `growing_pauses` has it. However many there are:
    what does not answer for days is tried thousands of times, and no float holds 2 to the power of that."""
    return min(longest, first * 2.0 ** min(tries, _MOST_DOUBLINGS))
