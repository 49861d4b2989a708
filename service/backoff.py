"""Growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_DOUBLINGS = 64


def backoff(first: float, longest: float) -> Iterator[float]:
    """Seconds between attempts, without end: each twice the previous one, from `first` up to `longest`."""
    pause = first
    while True:
        yield min(pause, longest)
        pause = min(2 * pause, longest)


def backoff_after(tries: int, first: float, longest: float) -> float:
    """Seconds to wait after `tries` tries in vain, counted from 0, as `backoff` has it. However many there are:
    what does not answer for days is tried thousands of times, and no float holds 2 to the power of that."""
    return min(longest, first * 2.0 ** min(tries, _MAX_DOUBLINGS))
