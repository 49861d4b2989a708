"""Which part of a blended corpus each sample comes from. Pure Python.

After any number n of samples each part has had its share of them to within less than one: part p may supply its j-th
sample (from 0) from sample floor(j / w_p) on and must do so by sample ceil((j + 1) / w_p) - 1, w_p being its share; of
the parts that may supply the next sample, the one with the earliest deadline does. That this always works is the
theorem of proportionate fairness (Baruah, Cohen, Plaxton and Varvel 1996, section 3; for one resource Tijdeman 1980).
Megatron-LM blends by the largest deficit instead, which can deviate by more with several parts.

The shares are ratios of whole numbers, so the order repeats itself after `period` samples, and any sample's part is
looked up in a table of that length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

from workers.data.order import SampleOrder, derived_seed

MAX_PERIOD = 2**20
"""Maximum number of samples after which the order repeats."""


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
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
    """Parts whose samples are taken in the ratio of `shares`."""

    shares: tuple[int, ...]
    """Samples of each part in a period; at least 1."""

    @property
    def period(self) -> int:
        """Samples after which the order of the parts repeats itself."""
        return sum(self.shares)

    def place(self, sample: int) -> tuple[int, int]:
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
        part, number = self.blend.place(sample)
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
    the order of `SampleOrder` itself; each of several has a seed of its own. `shifts`: as there."""
    seeds = [seed] if len(begins) == 1 else [derived_seed(seed, part) for part in range(len(begins))]
    pairs = zip(training_tokens, seeds, strict=True)
    orders = [SampleOrder(tokens, sequence_length, own, shifts) for tokens, own in pairs]
    return BlendedOrder(Blend(tuple(shares)), tuple(orders), tuple(begins))
