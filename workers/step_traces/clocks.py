"""Offsets between the clocks of several machines, from what their ranks did together.

No rank ends a communication before all ranks have begun it. So for each collective over all ranks, its end on one
machine bounds its beginning on another, and the other way round; all of these together permit an interval, whose middle
is used, with half its length as the error. This needs no extra messages, and no clock that can be set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workers.timing.recording import Recording

WORLD = "world"
"""Axis of the collectives over all ranks."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of the first rank's clock."""

    seconds: float
    error_seconds: float
    """The error in either direction."""


@dataclass
class _Meeting:
    """One collective over all ranks, as the ranks of one machine saw it."""

    last_begun: float = -math.inf
    first_over: float = math.inf


def clock_offsets(recordings: Mapping[int, Recording]) -> dict[str, ClockOffset]:
    """The offset of each clock that the recordings name. If two clocks have no collective in common, their first steps
    are assumed to begin together, with an error of the length of these steps."""
    by_clock: dict[str, list[Recording]] = {}
    for _, recording in sorted(recordings.items()):
        by_clock.setdefault(recording.clock, []).append(recording)
    meetings = {clock: _meetings(several) for clock, several in by_clock.items()}
    offsets: dict[str, ClockOffset] = {}
    for clock, several in by_clock.items():
        if not offsets:
            reference = clock
            offsets[clock] = ClockOffset(0.0, 0.0)
        else:
            offsets[clock] = _between(meetings[reference], meetings[clock]) or _by_first_steps(
                by_clock[reference], several
            )
    return offsets


def _meetings(recordings: Iterable[Recording]) -> dict[int, _Meeting]:
    meetings: dict[int, _Meeting] = {}
    for recording in recordings:
        for each in recording.slices:
            if each.axis == WORLD and each.number is not None:
                meeting = meetings.setdefault(each.number, _Meeting())
                begun = each.start if each.issued is None else each.issued
                meeting.last_begun = max(meeting.last_begun, begun)
                meeting.first_over = min(meeting.first_over, each.end)
    return meetings


def _between(reference: Mapping[int, _Meeting], other: Mapping[int, _Meeting]) -> ClockOffset | None:
    """None if they have nothing in common."""
    least, most = -math.inf, math.inf
    for number in reference.keys() & other.keys():
        here, there = reference[number], other[number]
        most = min(most, there.first_over - here.last_begun)
        least = max(least, there.last_begun - here.first_over)
    if math.isinf(least):
        return None
    return ClockOffset((least + most) / 2, abs(most - least) / 2)


def _by_first_steps(reference: Iterable[Recording], other: Iterable[Recording]) -> ClockOffset:
    here = [each.steps[0] for each in reference if each.steps]
    there = [each.steps[0] for each in other if each.steps]
    if not here or not there:
        return ClockOffset(0.0, 0.0)
    longest = max(each.end - each.start for each in (*here, *there))
    return ClockOffset(min(each.start for each in there) - min(each.start for each in here), longest)
