"""The global sample order, by arithmetic: sample i of a job is the same window of text on every layout and after every
restart, and no list of indices is ever stored or shuffled; which part of a blended corpus it comes from; and what
skipped samples do to the order. Pure Python."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

_ROUNDS = 4
MAX_PERIOD = 2**20
"""Maximum number of samples after which the order repeats."""


@dataclass(frozen=True)
class SampleOrder:
    """Start of every training sample's window in a corpus part.

    An epoch cuts the part into windows of one sequence each, shifted by a new offset every epoch, and visits them in a
    pseudo-random order: a permutation made by a Feistel network (Luby & Rackoff 1988) with cycle walking.
    """

    tokens: int
    """Tokens in the part; at least sequence_length + 1."""
    sequence_length: int
    """Tokens in a sample; one more is read for the targets."""
    seed: int
    """Seed of the job."""
    shifts: bool = True
    """Whether each epoch begins at a different token; not if texts were packed into samples that begin at multiples of
    sequence_length."""

    @property
    def windows(self) -> int:
        """Samples in one epoch. One sequence less than there are, so that epochs can be shifted."""
        if not self.shifts:
            return self.tokens // self.sequence_length
        return max(1, (self.tokens - 1) // self.sequence_length - 1)

    def start(self, sample: int) -> int:
        """First token of global sample `sample` (from 0, over all steps of the job)."""
        epoch, position = divmod(sample, self.windows)
        if not self.shifts:
            return self._permuted(position, epoch) * self.sequence_length
        spare = self.tokens - 1 - self.windows * self.sequence_length
        offset = _hash(self.seed, epoch, -1, 0) % (min(spare, self.sequence_length) + 1)
        return offset + self._permuted(position, epoch) * self.sequence_length

    def _permuted(self, position: int, epoch: int) -> int:
        """`position` of [0, windows) under the epoch's permutation."""
        half_bits = max(1, ((self.windows - 1).bit_length() + 1) // 2)
        mask = (1 << half_bits) - 1
        while True:
            left, right = position >> half_bits, position & mask
            for round_number in range(_ROUNDS):
                left, right = right, left ^ (_hash(self.seed, epoch, round_number, right) & mask)
            position = (left << half_bits) | right
            if position < self.windows:
                return position


def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Integers in the ratio of the decimal representations of `weights`; if their sum would exceed MAX_PERIOD, the
    nearest ones with that sum, which deviate by less than one sample in a million."""
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = lcm(*(each.denominator for each in exact))
    numbers = [int(each * unit) for each in exact]
    common = gcd(*numbers)
    numbers = [number // common for number in numbers]
    total = sum(numbers)
    if total <= MAX_PERIOD:
        return tuple(numbers)
    shares = [max(1, number * MAX_PERIOD // total) for number in numbers]
    # The remainder goes to those that were rounded down most (largest remainders).
    by_rest = sorted(range(len(numbers)), key=lambda part: (-(numbers[part] * MAX_PERIOD % total), part))
    for part in by_rest[: max(0, MAX_PERIOD - sum(shares))]:
        shares[part] += 1
    return tuple(shares)


@dataclass(frozen=True)
class Blend:
    """Parts whose samples are taken in the ratio of `shares`.

    After any number n of samples each part has had its share of them to within less than one: part p may supply its
    j-th sample (from 0) from sample floor(j / w_p) on and must do so by sample ceil((j + 1) / w_p) - 1, w_p being its
    share; of the parts that may supply the next sample, the one with the earliest deadline does. That this always works
    is the theorem of proportionate fairness (Baruah, Cohen, Plaxton and Varvel 1996, section 3; for one resource
    Tijdeman 1980). Megatron-LM blends by the largest deficit instead, which can deviate by more with several parts.

    The shares are whole numbers, so the order repeats itself after `period` samples, and any sample's part is looked up
    in a table of that length.
    """

    shares: tuple[int, ...]
    """Samples of each part in a period; at least 1."""

    @property
    def period(self) -> int:
        """Samples after which the order of the parts repeats itself."""
        return sum(self.shares)

    def locate(self, sample: int) -> tuple[int, int]:
        """The part that sample number `sample` comes from, and its number among that part's samples."""
        if len(self.shares) == 1:
            return 0, sample
        periods, position = divmod(sample, self.period)
        parts, numbers = self._table
        part = parts[position]
        return part, periods * self.shares[part] + numbers[position]

    @cached_property
    def _table(self) -> tuple[array[int], array[int]]:
        """For each sample of a period its part, and its number among the part's samples."""
        period, parts, numbers = self.period, array("I"), array("I")
        waiting: list[tuple[int, int]] = [(0, part) for part in range(len(self.shares))]
        due: list[tuple[int, int]] = []
        taken = [0] * len(self.shares)
        for sample in range(period):
            while waiting and waiting[0][0] <= sample:
                part = heappop(waiting)[1]
                heappush(due, (-(-(taken[part] + 1) * period // self.shares[part]), part))
            part = heappop(due)[1]
            parts.append(part)
            numbers.append(taken[part])
            taken[part] += 1
            heappush(waiting, (taken[part] * period // self.shares[part], part))
        return parts, numbers


@dataclass(frozen=True)
class BlendedOrder:
    """Start of every training sample's window in a row of tokens that consists of several parts."""

    blend: Blend
    parts: tuple[SampleOrder, ...]
    """The order within each part, which counts its own epochs."""
    begins: tuple[int, ...]
    """First token of each part."""

    def start(self, sample: int) -> int:
        """First token of global sample `sample` (from 0, over all steps of the job)."""
        part, number = self.blend.locate(sample)
        return self.begins[part] + self.parts[part].start(number)


def blended(
    shares: Sequence[int],
    begins: Sequence[int],
    training_tokens: Sequence[int],
    sequence_length: int,
    seed: int,
    shifts: bool = True,
) -> BlendedOrder:
    """The order over parts that begin at `begins`, whose first `training_tokens` are for training. A single part has
    the order of `SampleOrder` itself; each of several has a seed of its own, so that
    parts of the same size are not visited in the same order. `shifts`: as there."""
    seeds = [seed] if len(begins) == 1 else [_hash(seed, part) for part in range(len(begins))]
    pairs = zip(training_tokens, seeds, strict=True)
    orders = [SampleOrder(tokens, sequence_length, own, shifts) for tokens, own in pairs]
    return BlendedOrder(Blend(tuple(shares)), tuple(orders), tuple(begins))


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges of samples that no step uses.

    A step uses places in the order, which are numbered without gaps (`batch_plan.py`). Place n has sample n as long as
    nothing is skipped, otherwise the n-th sample that is not skipped. So the samples of a step depend on the skipped
    ranges only, and skipping one changes nothing about the steps before it.
    """

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

    def sample(self, index: int) -> int:
        """The sample at `index` of the order."""
        for each in self.ranges:
            if index < each.start:
                break
            index += len(each)
        return index

    def samples(self, indices: range) -> list[range]:
        """The samples at `indices`, in order: one range, or several if skipped ones are in between."""
        ranges: list[range] = []
        for sample in map(self.sample, indices):
            if ranges and ranges[-1].stop == sample:
                ranges[-1] = range(ranges[-1].start, sample + 1)
            else:
                ranges.append(range(sample, sample + 1))
        return ranges
