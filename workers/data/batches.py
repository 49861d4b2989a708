"""Micro-batches of one replica, read from the corpus in the global sample order.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from workers.config import JobSpec
from workers.data.batch_plan import BatchPlan, replica_micro_batches
from workers.data.corpus import ByteCorpus
from workers.data.corpus_record import as_recorded
from workers.data.order import SampleOrder
from workers.data.skipped_samples import SkippedSamples
from workers.data.sources import corpus_files, split_corpus
from workers.storage.places import Place

# Target of a position that has none: it adds nothing to the loss and does not count as a token.
NO_TARGET = -1


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a step, with the tokens for the stages that read them."""

    samples: range
    """Their places in the global order, which also key their dropout."""
    inputs_sb: torch.Tensor | None = None
    """Tokens, int64 [s, b]; None on stages that do not read them."""
    targets_sb: torch.Tensor | None = None
    """The tokens that follow them, int64 [s, b], or NO_TARGET."""


class Batches:
    """Reads a replica's micro-batches for any step, in any order. Raises DataError when the corpus does not do."""

    def __init__(
        self,
        spec: JobSpec,
        replica: int,
        device: torch.device,
        reads_tokens: bool = True,
        record: Place | None = None,
        records: bool = False,
    ):
        """`reads_tokens`: whether this rank's stage is the first or the last; `record`: file that says what the corpus
        was when the job began; `records`: whether this rank makes it."""
        self.spec, self.replica, self.device, self.reads_tokens = spec, replica, device, reads_tokens
        self.plan = BatchPlan(spec.train)
        files = corpus_files(spec.data)
        self.corpus = ByteCorpus(files if record is None else as_recorded(files, record, records))
        self.training_tokens, self.validation_tokens = split_corpus(spec, len(self.corpus))
        self.order = SampleOrder(self.training_tokens, spec.model.sequence_length, spec.train.seed)
        self.skipped = SkippedSamples()
        """Training samples that are not used; the same on all ranks."""

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1)."""
        return self._read(self.plan.samples(step), lambda place: self.order.start(self.skipped.sample(place)))

    def samples(self, step: int) -> list[range]:
        """All samples of step `step`, of all replicas."""
        return self.skipped.samples(self.plan.samples(step))

    def validation_batches(self) -> int:
        """Global batches in one validation: `train.validation_batches`, or fewer where the held-out part is short."""
        windows = (self.validation_tokens - 1) // self.spec.model.sequence_length
        whole = max(1, windows // self.spec.train.global_batch_size)
        return min(self.spec.train.validation_batches, whole)

    def validation(self, batch: int) -> list[MicroBatch]:
        """The replica's micro-batches of validation batch `batch`: the held-out text from its start, in order.
        Windows past its end are read from its start again."""
        length, size = self.spec.model.sequence_length, self.spec.train.global_batch_size
        windows = (self.validation_tokens - 1) // length

        def start(sample: int) -> int:
            return self.training_tokens + (sample % windows) * length

        return self._read(range(batch * size, (batch + 1) * size), start)

    def _read(self, samples: range, start_of: Callable[[int], int]) -> list[MicroBatch]:
        parts = replica_micro_batches(samples, self.spec, self.replica)
        if not self.reads_tokens:
            return [MicroBatch(part) for part in parts]
        return [self._micro_batch(part, [start_of(sample) for sample in part]) for part in parts]

    def _micro_batch(self, samples: range, starts: list[int]) -> MicroBatch:
        length = self.spec.model.sequence_length
        windows_bs = np.stack([self.corpus.read(start, length + 1) for start in starts])
        tokens_sb = torch.from_numpy(windows_bs).t().contiguous().to(self.device)
        return MicroBatch(samples, tokens_sb[:-1], tokens_sb[1:])
