"""The recordings of several ranks as one trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from workers.comm.grid import RankGrid
from workers.step_traces.clocks import clock_offsets
from workers.timing.recording import Recording, Slice, TracedStep

ROUNDING = 3e-7
"""Seconds by which a slice may seem to end after one around it, since times travel rounded."""


@dataclass(frozen=True)
class TracedRank:
    """What one rank did, in seconds from the trace's beginning."""

    rank: int
    steps: tuple[TracedStep, ...]
    slices: tuple[Slice, ...]
    """By their start, outer ones first."""
    peak_flops: float | None = None
    """FLOP/s of its device at its peak."""

    def of_step(self, step: TracedStep) -> list[Slice]:
        """The slices of one of its steps."""
        return [each for each in self.slices if step.start <= each.start < step.end]

    @property
    def seconds(self) -> float:
        """Of all of its steps together."""
        return sum(step.end - step.start for step in self.steps)


@dataclass(frozen=True)
class StepTrace:
    """What the ranks of a job did in some steps."""

    grid: RankGrid
    ranks: tuple[TracedRank, ...]
    """Those that have recorded, ascending."""
    error_seconds: float = 0.0
    """By how much times of two ranks may be apart that are said to be the same."""
    device: bool = False
    """Whether the times are those of the devices; else they are the hosts'."""

    @property
    def end(self) -> TracedRank | None:
        """The rank whose last step ends last; None where nothing was recorded."""
        return max((each for each in self.ranks if each.steps), key=lambda each: each.steps[-1].end, default=None)

    def of_replica(self, rank: int) -> list[TracedRank]:
        """The ranks of the replica that `rank` belongs to."""
        data = self.grid.coordinates(rank).data
        return [each for each in self.ranks if self.grid.coordinates(each.rank).data == data]


def assembled(recordings: Mapping[int, Recording], grid: RankGrid) -> StepTrace:
    """One trace of what ranks of `grid` have recorded, on one clock that begins with the first step."""
    offsets = clock_offsets(recordings)
    begins = [each.steps[0].start - offsets[each.clock].seconds for each in recordings.values() if each.steps]
    begin = min(begins, default=0.0)
    ranks = [_shifted(rank, each, begin + offsets[each.clock].seconds) for rank, each in sorted(recordings.items())]
    of_devices = max((each.error_seconds for each in recordings.values()), default=0.0)
    of_clocks = max((each.error_seconds for each in offsets.values()), default=0.0)
    devices = bool(recordings) and all(each.device for each in recordings.values())
    return StepTrace(grid, tuple(ranks), of_clocks + of_devices, devices)


def _shifted(rank: int, recording: Recording, by: float) -> TracedRank:
    steps = tuple(TracedStep(each.step, each.start - by, each.end - by) for each in recording.steps)
    slices = tuple(
        each._replace(
            start=each.start - by, end=each.end - by, issued=None if each.issued is None else each.issued - by
        )
        for each in recording.slices
    )
    return TracedRank(rank, steps, slices, recording.peak_flops)


def nested(slices: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...]]]:
    """Each slice with those around it, the outermost first; of slices by their start, outer ones first."""
    around: list[Slice] = []
    for each in slices:
        while around and (around[-1].end <= each.start < each.end or around[-1].end < each.end - ROUNDING):
            around.pop()
        yield each, tuple(around)
        around.append(each)
