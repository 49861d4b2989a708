"""Packs conversations into samples for training, which begin at multiples of the sequence length: each holds whole
conversations, followed by filler tokens.

A conversation that is longer than a sample is truncated. The others are placed where they leave the least room (best
fit, over the most recently begun samples), in the order of the corpus, so that every process gets the same result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from manta.workers.config import JobSpec
from manta.workers.data.indexed_dataset import IndexedTokens, read_index
from manta.workers.errors import DataError

OPEN_SAMPLES = 64
"""Number of samples that may still get a conversation. The fullest is closed first."""
FILLER = 0
"""Filler token after a sample's last conversation; no learned position attends to it."""


@dataclass(frozen=True)
class Marks:
    """What is known about some tokens in addition to their ids."""

    learned: npt.NDArray[np.bool_]
    """For each token, whether it is to be predicted."""
    begins: tuple[int, ...]
    """Positions at which a conversation or the filler begins; the first is 0."""


class PackedConversations:
    """The conversations of a corpus as a row of tokens: first the samples for training, then those held out."""

    def __init__(self, tokens: IndexedTokens, marks: IndexedTokens, length: int, held_out: float, name: str):
        """`tokens`: the conversations end to end, with `marks` (1: learned); `length`: of a sample; `held_out`:
        fraction of the conversations, at the end, that is not used for training; `name`: of the corpus, for messages.
        Raises DataError."""
        self._tokens, self._marks, self._length, self._name = tokens, marks, length, name
        lengths = read_index(tokens.prefix).lengths.astype(np.int64)
        self._begins = np.cumsum(lengths) - lengths
        self._lengths = np.minimum(lengths, length)
        longer = np.flatnonzero(lengths > length)
        self.cut = len(longer)
        """Number of conversations that are longer than a sample."""
        nothing = {int(number) for number in longer if not marks.read(self._begins[number], length)[1:].any()}
        used = [number for number in range(len(lengths)) if number not in nothing]
        training = len(used) - int(len(used) * held_out)
        parts = [packed(used[:training], self._lengths, length), packed(used[training:], self._lengths, length)]
        self._training = len(parts[0])
        # As arrays: lists of a million conversations take 58 MB, on every rank.
        self._numbers = np.fromiter(chain.from_iterable(chain(*parts)), np.int64)
        self._ends = np.cumsum([len(sample) for sample in chain(*parts)], dtype=np.int64)

    def __len__(self) -> int:
        """Number of tokens: those of the samples, and one after the last."""
        return len(self._ends) * self._length + 1

    @property
    def training_tokens(self) -> int:
        """Tokens of the samples for training, filler included."""
        return self._training * self._length

    def beginning(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The first `most` tokens of the conversations end to end, and which of them are learned."""
        count = min(most, len(self._tokens))
        learned = self._marks.read(0, count).astype(bool)
        learned[self._begins[self._begins < count]] = False  # nothing comes before a conversation's first token
        return self._tokens.read(0, count), learned

    def split(self, spec: JobSpec) -> tuple[int, int]:
        """Tokens of the training and of the validation part. Raises DataError if there are not enough conversations."""
        training = self.training_tokens
        if not training:
            raise DataError(
                f"no conversation for training in {self._name}: none has an answer (by the role assistant) within "
                f"its first {self._length} tokens (model.sequence_length), or all are held out"
            )
        if spec.train.validate_every and spec.data.validation_fraction and self._training == len(self._ends):
            off = "data.validation_fraction: 0" if spec.data.validation else "train.validate_every: 0"
            raise DataError(
                f"no conversation of {self._name} is held out: raise data.validation_fraction or turn validation off "
                f"({off})"
            )
        return training, len(self) - training

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64. Raises IndexError outside of the row."""
        values = np.full(length, FILLER, np.int64)
        for position, first, count, _ in self._pieces(start, length):
            values[position : position + count] = self._tokens.read(first, count)
        return values

    def marks(self, start: int, length: int) -> Marks:
        """Marks of tokens [start, start + length). A conversation's first token is not learned, since nothing comes
        before it. Raises IndexError outside of the row."""
        learned, begins = np.zeros(length, bool), {0}
        for position, first, count, is_begin in self._pieces(start, length):
            learned[position : position + count] = self._marks.read(first, count).astype(bool)
            if is_begin:
                learned[position] = False
                begins.add(position)
            begins.add(position + count)
        return Marks(learned, tuple(sorted(begins - {length})))

    def close(self) -> None:
        """Let go of the files."""
        self._tokens.close()
        self._marks.close()

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int, bool]]:
        """For each conversation with tokens in [start, start + length): its position there, the index of its first such
        token among all tokens, their number, and whether it begins there."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a row of {len(self)}")
        for sample in range(start // self._length, min(-(-(start + length) // self._length), len(self._ends))):
            at = sample * self._length - start
            first = self._ends[sample - 1] if sample else 0
            for number in self._numbers[first : self._ends[sample]]:
                size = int(self._lengths[number])
                low, high = max(at, 0), min(at + size, length)
                if low < high:
                    yield low, int(self._begins[number]) + low - at, high - low, low == at
                at += size


def packed(numbers: Sequence[int], lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """`numbers` in samples of at most `capacity` tokens; number n has `lengths`[n] tokens."""
    samples: list[list[int]] = []
    begun: list[tuple[int, int]] = []  # room and number of samples that may get more, the fullest first
    for number in numbers:
        size = int(lengths[number])
        at = bisect_left(begun, (size, -1))
        if at < len(begun):
            room, sample = begun.pop(at)
        else:
            room, sample = capacity, len(samples)
            samples.append([])
            if len(begun) == OPEN_SAMPLES:
                begun.pop(0)
        samples[sample].append(number)
        if room > size:
            insort(begun, (room - size, sample))
    return samples
