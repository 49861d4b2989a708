"""Micro-batches of one replica, read from the corpus in the global sample order.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from workers.config import JobSpec
from workers.data.batch_plan import BatchPlan, replica_micro_batches
from workers.data.corpus import ByteCorpus
from workers.data.corpus_record import as_recorded
from workers.data.held_out import HeldOut, validation_sets
from workers.data.order import SampleOrder
from workers.data.packed_documents import Documents
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
    documents: Documents | None = None
    """Where attention stays within documents: those of the samples, on all stages."""


def with_documents_apart(batch: MicroBatch, end: int) -> MicroBatch:
    """The same micro-batch, in which each document, the last token of which is `end`, is by itself: nothing follows
    there that its own document could tell."""
    inputs_sb, targets_sb = batch.inputs_sb, batch.targets_sb
    assert inputs_sb is not None and targets_sb is not None
    documents = Documents.of(inputs_sb.t().cpu().numpy(), end)
    return replace(batch, targets_sb=targets_sb.masked_fill(inputs_sb == end, NO_TARGET), documents=documents)


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
        self.held_out = self._held_out(record, records)
        """What validation losses are measured with; nothing where none are."""
        self.skipped = SkippedSamples()
        """Training samples that are not used; the same on all ranks."""

    def _held_out(self, record: Place | None, records: bool) -> tuple[HeldOut, ...]:
        train = self.spec.train
        if not train.validate_every:
            return ()
        own = HeldOut(None, self.corpus, self.training_tokens, self.validation_tokens, train.validation_batches)
        sets = validation_sets(self.spec, record, records)
        return (own, *sets) if self.spec.data.validation_fraction else tuple(sets)

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1)."""
        return self._read(self.plan.samples(step), lambda place: self.order.start(self.skipped.sample(place)))

    def samples(self, step: int) -> list[range]:
        """All samples of step `step`, of all replicas."""
        return self.skipped.samples(self.plan.samples(step))

    def validation(self, held_out: HeldOut, batch: int) -> list[MicroBatch]:
        """The replica's micro-batches of validation batch `batch`: the text from its start, in order. Windows past its
        end are read from its start again."""
        length, size = self.spec.model.sequence_length, self.spec.train.global_batch_size
        samples = range(batch * size, (batch + 1) * size)
        return self._read(samples, lambda sample: held_out.start(sample, length), held_out.corpus)

    def _read(
        self, samples: range, start_of: Callable[[int], int], corpus: ByteCorpus | None = None
    ) -> list[MicroBatch]:
        """The replica's part of `samples`, whose windows begin at `start_of` in the corpus (default: the job's)."""
        parts = replica_micro_batches(samples, self.spec, self.replica)
        if not self.reads_tokens:
            return [MicroBatch(part) for part in parts]
        text = corpus or self.corpus
        return [self._micro_batch(text, part, [start_of(sample) for sample in part]) for part in parts]

    def _micro_batch(self, corpus: ByteCorpus, samples: range, starts: list[int]) -> MicroBatch:
        length = self.spec.model.sequence_length
        windows_bs = np.stack([corpus.read(start, length + 1) for start in starts])
        tokens_sb = torch.from_numpy(windows_bs).t().contiguous().to(self.device)
        return MicroBatch(samples, tokens_sb[:-1], tokens_sb[1:])
