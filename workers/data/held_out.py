"""Held-out text, for measuring validation losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.config import JobSpec
from workers.data.order import Blend
from workers.data.prepare import Corpus, open_corpus
from workers.data.sources import check_validation_set
from workers.data.token_cache import SILENT, Watcher
from workers.storage.places import Place
from workers.training import metric_names


@dataclass(frozen=True)
class HeldOut:
    """Windows of one sequence each, end to end, which are read in their order."""

    name: str | None
    """Name of the validation set; None: the held-out part of the training corpus."""
    corpus: Corpus
    first: int
    """First token of the text."""
    tokens: int
    """Tokens in it."""
    most_batches: int
    """Global batches per validation, if there is enough text."""

    @property
    def metric(self) -> str:
        """Name of its loss in the metrics."""
        return metric_names.validation_loss(self.name)

    def windows(self, length: int) -> int:
        """Sequences of `length` tokens, with the targets of each."""
        return (self.tokens - 1) // length

    def batches(self, spec: JobSpec) -> int:
        """Global batches per validation: as configured, or fewer if the text is short."""
        whole = max(1, self.windows(spec.model.sequence_length) // spec.train.global_batch_size)
        return min(self.most_batches, whole)

    def start(self, sample: int, length: int) -> int:
        """First token of sequence number `sample`; past the end of the text it wraps around."""
        return self.first + (sample % self.windows(length)) * length


@dataclass(frozen=True)
class BlendedHeldOut(HeldOut):
    """The last part of each part of a blended corpus, in the ratio of the weights."""

    parts: tuple[tuple[int, int], ...]
    """First held-out token of each part, and their number."""
    blend: Blend
    """Which part a window comes from."""

    def windows(self, length: int) -> int:
        """Sequences of all parts."""
        return sum((tokens - 1) // length for _, tokens in self.parts)

    def start(self, sample: int, length: int) -> int:
        """As for a single text; a part wraps around past the end of its text."""
        part, number = self.blend.place(sample)
        first, tokens = self.parts[part]
        return first + (number % ((tokens - 1) // length)) * length


def validation_sets(
    spec: JobSpec, record: Place | None, records: bool, cache: Path | None = None, watcher: Watcher = SILENT
) -> list[HeldOut]:
    """The validation sets of a job. `record`: file that records the training corpus as it was when the job began; the
    records of validation sets are next to it; the other parameters are those of `open_corpus`. Raises DataError if one
    is unsuitable."""
    sets = []
    for each in spec.data.validation:
        own = None if record is None else record.parent / f"validation-{each.name}.json"
        corpus = open_corpus(spec, cache, own, records, watcher, spec.data.corpus_of(each))
        check_validation_set(spec, each, len(corpus))
        sets.append(HeldOut(each.name, corpus, 0, len(corpus), each.batches or spec.train.validation_batches))
    return sets
