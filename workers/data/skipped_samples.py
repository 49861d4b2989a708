"""Samples that a job skips, and what that does to the order in which it uses the others. Pure Python.

A step uses places in the order, which are numbered without gaps (`batch_plan.py`). Place n has sample n as long as
nothing is skipped, otherwise the n-th sample that is not skipped. So the samples of a step depend on the skipped ranges
only, and skipping one changes nothing about the steps before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges of samples that no step uses."""

    ranges: tuple[range, ...] = ()
    """Sorted, and separated by other samples."""

    @classmethod
    def of(cls, ranges: Iterable[range]) -> SkippedSamples:
        """The union of any ranges."""
        merged: list[range] = []
        for each in sorted((each for each in ranges if each), key=lambda each: each.start):
            if merged and each.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
            else:
                merged.append(each)
        return cls(tuple(merged))

    def sample(self, place: int) -> int:
        """The sample at `place` of the order."""
        for each in self.ranges:
            if place < each.start:
                break
            place += len(each)
        return place

    def samples(self, places: range) -> list[range]:
        """The samples at `places`, in order: one range, or several if skipped ones are in between."""
        ranges: list[range] = []
        for sample in map(self.sample, places):
            if ranges and ranges[-1].stop == sample:
                ranges[-1] = range(ranges[-1].start, sample + 1)
            else:
                ranges.append(range(sample, sample + 1))
        return ranges
