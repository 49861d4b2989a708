"""Micro-batches of one replica, cut from the global sample order.

Step n of a job uses the global samples [(n - 1) * B, n * B), B being the global batch size; replica r takes the
r-th of d equal, contiguous parts of them. Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workers.config import JobSpec
from workers.data.corpus import ByteCorpus
from workers.data.order import SampleOrder
from workers.data.sources import corpus_files, split_corpus


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and the tokens that follow them."""

    inputs_sb: torch.Tensor
    """int64 [s, b]."""
    targets_sb: torch.Tensor
    """int64 [s, b]."""


class Batches:
    """Reads a replica's micro-batches for any step, in any order. Raises DataError when the corpus does not do."""

    def __init__(self, spec: JobSpec, replica: int, device: torch.device):
        self.spec, self.replica, self.device = spec, replica, device
        self.corpus = ByteCorpus(corpus_files(spec.data))
        self.training_tokens, self.validation_tokens = split_corpus(spec, len(self.corpus))
        self.order = SampleOrder(self.training_tokens, spec.model.sequence_length, spec.train.seed)

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1)."""
        first = (step - 1) * self.spec.train.global_batch_size
        return [self._read([self.order.start(first + sample) for sample in part]) for part in self._parts()]

    def validation_batches(self) -> int:
        """Global batches in one validation: `train.validation_batches`, or fewer where the held-out part is short."""
        windows = (self.validation_tokens - 1) // self.spec.model.sequence_length
        whole = max(1, windows // self.spec.train.global_batch_size)
        return min(self.spec.train.validation_batches, whole)

    def validation(self, batch: int) -> list[MicroBatch]:
        """The replica's micro-batches of validation batch `batch`: the held-out text from its start, in order.
        Windows past its end are read from its start again."""
        length = self.spec.model.sequence_length
        windows = (self.validation_tokens - 1) // length
        first = batch * self.spec.train.global_batch_size
        return [
            self._read([self.training_tokens + ((first + sample) % windows) * length for sample in part])
            for part in self._parts()
        ]

    def _parts(self) -> list[range]:
        """Sample numbers, within the global batch, of each of this replica's micro-batches."""
        b, m = self.spec.train.micro_batch_size, self.spec.micro_batches
        start = self.replica * m * b
        return [range(start + i * b, start + (i + 1) * b) for i in range(m)]

    def _read(self, starts: list[int]) -> MicroBatch:
        length = self.spec.model.sequence_length
        windows_bs = np.stack([self.corpus.read(start, length + 1) for start in starts])
        tokens_sb = torch.from_numpy(windows_bs).t().contiguous().to(self.device)
        return MicroBatch(tokens_sb[:-1], tokens_sb[1:])
