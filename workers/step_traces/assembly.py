"""The recordings of several ranks as one trace, on one clock.

Offsets between the clocks of several machines follow from what their ranks did together: no rank ends a communication
before all ranks have begun it. So for each collective over all ranks, its end on one machine bounds its beginning on
another, and the other way round; all of these together permit an interval, whose middle is used, with half its length
as the error. This needs no extra messages, and no clock that can be set.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from manta.workers.comm.grid import RankGrid
from manta.workers.timing.recording import Recording, Slice, SliceKind, TracedStep

PASSES: frozenset[SliceKind] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""Kinds of slices in which a micro-batch passes through a virtual stage."""
ROUNDING = 3e-7
"""Seconds by which a slice may seem to end after the one that contains it, since times are rounded for transfer."""


@dataclass(frozen=True)
class TracedRank:
    """What one rank did, in seconds from the trace's beginning."""

    rank: int
    steps: tuple[TracedStep, ...]
    slices: tuple[Slice, ...]
    """By start, outer ones first."""
    peak_flops: float | None = None
    """Peak FLOP/s of its device."""

    @cached_property
    def by_step(self) -> list[list[Slice]]:
        """The slices of each of its steps."""
        starts = [each.start for each in self.slices]
        cuts = [bisect_left(starts, step.start) for step in self.steps]
        return [list(self.slices[start:end]) for start, end in zip(cuts, [*cuts[1:], len(starts)], strict=True)]

    @cached_property
    def pass_ends(self) -> list[float]:
        """When its last pass ends in each of its steps."""
        return [
            max((each.end for each in slices if each.kind in PASSES), default=step.start)
            for step, slices in zip(self.steps, self.by_step, strict=True)
        ]

    @property
    def seconds(self) -> float:
        """Length of all of its steps together."""
        return sum(step.end - step.start for step in self.steps)


@dataclass(frozen=True)
class StepTrace:
    """What the ranks of a job did in some steps."""

    grid: RankGrid
    ranks: tuple[TracedRank, ...]
    """The ranks that have recorded, ascending."""
    error_seconds: float = 0.0
    """By how much two ranks' times that are shown as equal may differ."""
    device: bool = False
    """Whether the times are those of the devices; otherwise of the hosts."""

    @property
    def end(self) -> TracedRank | None:
        """The rank whose last step ends last; None if nothing was recorded."""
        return max((rank for rank in self.ranks if rank.steps), key=lambda each: each.steps[-1].end, default=None)

    def replica_pass_ends(self, rank: int) -> list[float]:
        """When the last pass of the replica that contains `rank` ends in each step, on whichever of its ranks."""
        return self._pass_ends[self.grid.coordinates(rank).data]

    @cached_property
    def _pass_ends(self) -> dict[int, list[float]]:
        ends: dict[int, list[list[float]]] = {}
        for rank in self.ranks:
            ends.setdefault(self.grid.coordinates(rank.rank).data, []).append(rank.pass_ends)
        return {
            data: [max(of_step) for of_step in zip_longest(*of_ranks, fillvalue=0.0)] for data, of_ranks in ends.items()
        }


def assembled(recordings: Mapping[int, Recording], grid: RankGrid) -> StepTrace:
    """One trace of what ranks of `grid` have recorded, on one clock that begins with the first step."""
    offsets = clock_offsets(recordings)
    begins = [
        recording.steps[0].start - offsets[recording.clock].seconds
        for recording in recordings.values()
        if recording.steps
    ]
    begin = min(begins, default=0.0)
    ranks = [_shifted(rank, each, begin + offsets[each.clock].seconds) for rank, each in sorted(recordings.items())]
    of_devices = max((recording.error_seconds for recording in recordings.values()), default=0.0)
    of_clocks = max((offset.error_seconds for offset in offsets.values()), default=0.0)
    devices = bool(recordings) and all(recording.device for recording in recordings.values())
    return StepTrace(grid, tuple(ranks), of_clocks + of_devices, devices)


def _shifted(rank: int, recording: Recording, by: float) -> TracedRank:
    steps = tuple(TracedStep(step.step, step.start - by, step.end - by) for step in recording.steps)
    slices = tuple(
        each._replace(
            start=each.start - by, end=each.end - by, issued=None if each.issued is None else each.issued - by
        )
        for each in recording.slices
    )
    return TracedRank(rank, steps, slices, recording.peak_flops)


def parents(slices: Iterable[Slice]) -> Iterator[int | None]:
    """For each slice the index of the innermost one around it; the slices must be sorted by start, outer ones first."""
    around: list[tuple[int, float]] = []
    for index, each in enumerate(slices):
        while around and (around[-1][1] <= each.start < each.end or around[-1][1] < each.end - ROUNDING):
            around.pop()
        yield around[-1][0] if around else None
        around.append((index, each.end))


def nested(slices: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...]]]:
    """Each slice with those around it, the outermost first; the slices must be sorted by start, outer ones first."""
    known = list(slices)
    chains: list[tuple[Slice, ...]] = []
    for each, parent in zip(known, parents(known), strict=True):
        chains.append(() if parent is None else (*chains[parent], known[parent]))
        yield each, chains[-1]


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

    last_started: float = -math.inf
    first_finished: float = math.inf


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
                started = each.start if each.issued is None else each.issued
                meeting.last_started = max(meeting.last_started, started)
                meeting.first_finished = min(meeting.first_finished, each.end)
    return meetings


def _between(reference: Mapping[int, _Meeting], other: Mapping[int, _Meeting]) -> ClockOffset | None:
    """None if they have nothing in common."""
    least, most = -math.inf, math.inf
    for number in reference.keys() & other.keys():
        here, there = reference[number], other[number]
        most = min(most, there.first_finished - here.last_started)
        least = max(least, there.last_started - here.first_finished)
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
