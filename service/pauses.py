"""Growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator


def growing_pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds between tries, without end: each twice the one before, from `first` to `longest`."""
    pause = first
    while True:
        yield min(pause, longest)
        pause = min(2 * pause, longest)
