"""The global sample order, by arithmetic: sample i of a job is the same window of text on every layout and after
every restart, and no list of indices is ever stored or shuffled. Pure Python.

An epoch cuts the corpus into windows of one sequence each, shifted by a new offset every epoch, and visits them in
a pseudo-random order: a permutation made by a Feistel network (Luby & Rackoff 1988) with cycle walking.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_ROUNDS = 4


@dataclass(frozen=True)
class SampleOrder:
    """Start of every training sample's window in a corpus part."""

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


def derived_seed(seed: int, part: int) -> int:
    """A seed for part number `part` of a corpus, so that parts of the same size are not visited in the same order."""
    return _hash(seed, part)


def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
