"""Micro-batches of one replica, read from the corpus in the global sample order, and from held-out texts for validation
losses.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import BatchPlan, most_samples, replica_micro_batches
from manta.workers.data.order import Blend, SkippedSamples, blended, integer_shares
from manta.workers.data.packed_conversations import Marks
from manta.workers.data.prepare import Corpus, open_corpus, splits_of
from manta.workers.data.sources import check_validation_set
from manta.workers.data.token_cache import NO_WATCHER, Watcher
from manta.workers.errors import DataError
from manta.workers.spec.sequence_runs import Run, runs_of
from manta.workers.storage.locations import Location
from manta.workers.training import metric_names

# Target of a position that has none: it does not contribute to the loss and does not count as a token.
NO_TARGET = -1


@dataclass(frozen=True)
class Documents:
    """The documents of some samples, which are consecutive within each sample, so that attention can stay within
    each."""

    starts: tuple[tuple[int, ...], ...]
    """For each sample the positions at which a document begins; the first is 0."""
    length: int
    """Tokens of a sample (s)."""

    @classmethod
    def of(cls, tokens_bs: np.ndarray, end: int) -> Documents:
        """The documents of samples in which `end` is each document's last token."""
        length = tokens_bs.shape[1]
        starts = [(0, *(np.flatnonzero(row[: length - 1] == end) + 1).tolist()) for row in tokens_bs]
        return cls(tuple(starts), length)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, sample after sample; s b in total."""
        return [end - start for row in self.starts for start, end in pairwise((*row, self.length))]

    def first_tokens(self) -> torch.Tensor:
        """For each token the position at which its document begins: int64 [b, s]."""
        rows = [
            torch.repeat_interleave(torch.tensor(row), torch.tensor([*row, self.length]).diff()) for row in self.starts
        ]
        return torch.stack(rows) if rows else torch.empty(0, self.length, dtype=torch.int64)


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
    max_batches: int
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
        return min(self.max_batches, whole)

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
        part, number = self.blend.locate(sample)
        first, tokens = self.parts[part]
        return first + (number % ((tokens - 1) // length)) * length


def validation_sets(
    spec: JobSpec, record: Location | None, records: bool, cache: Path | None = None, watcher: Watcher = NO_WATCHER
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


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a step, with the tokens for the stages that read them."""

    samples: range
    """Positions of the samples in the global order, which also determine their dropout."""
    inputs_sb: torch.Tensor | None = None
    """Tokens, int64 [s, b]; None on stages that do not read them."""
    targets_sb: torch.Tensor | None = None
    """Targets: the following tokens, int64 [s, b], or NO_TARGET."""
    documents: Documents | None = None
    """Documents of the whole samples that attention does not cross, on all stages; None: it crosses them."""
    most_samples: int = 0
    """With expert parallelism, samples of the same micro-batch on the rank of the expert-parallel group that has most.
    There may be none here."""

    def part(self, runs: Sequence[Run]) -> MicroBatch:
        """What a context rank needs that has these runs of the sequence: their tokens and targets, and all
        documents."""
        if self.inputs_sb is None or self.targets_sb is None or runs == ((0, len(self.inputs_sb)),):
            return self
        inputs_sb, targets_sb = (
            torch.cat([tokens[first:end] for first, end in runs]) for tokens in (self.inputs_sb, self.targets_sb)
        )
        return replace(self, inputs_sb=inputs_sb, targets_sb=targets_sb)


def with_separate_documents(batch: MicroBatch, end: int) -> MicroBatch:
    """`batch` with each document, whose last token is `end`, by itself: its last position has no target, since what
    follows belongs to another document."""
    inputs_sb, targets_sb = batch.inputs_sb, batch.targets_sb
    assert inputs_sb is not None and targets_sb is not None
    documents = Documents.of(inputs_sb.t().numpy(), end)
    return replace(batch, targets_sb=targets_sb.masked_fill(inputs_sb == end, NO_TARGET), documents=documents)


def with_marks(batch: MicroBatch, marks: Sequence[Marks], separate: bool) -> MicroBatch:
    """`batch` with targets only where the `marks` of its samples say so; `separate`: also with each conversation by
    itself."""
    targets_sb = batch.targets_sb
    assert targets_sb is not None
    learned_bs = np.stack([mark.learned[1:] for mark in marks])
    learned_sb = torch.from_numpy(learned_bs).t()
    length = len(targets_sb)
    starts = tuple(tuple(start for start in mark.begins if start < length) for mark in marks)
    documents = Documents(starts, length) if separate else None
    return replace(batch, targets_sb=targets_sb.masked_fill(~learned_sb, NO_TARGET), documents=documents)


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """`batch` with its tokens on `device`; the host does not wait until they are there."""
    if device.type == "cpu" or batch.inputs_sb is None or batch.targets_sb is None:
        return batch
    inputs_sb, targets_sb = (
        tokens.pin_memory().to(device, non_blocking=True) for tokens in (batch.inputs_sb, batch.targets_sb)
    )
    return replace(batch, inputs_sb=inputs_sb, targets_sb=targets_sb)


class Batches:
    """Reads a replica's micro-batches for any step, in any order, from any thread. Raises DataError if the corpus is
    unsuitable."""

    def __init__(
        self,
        spec: JobSpec,
        replica: int,
        device: torch.device,
        reads_tokens: bool = True,
        record: Location | None = None,
        records: bool = False,
        cache: Path | None = None,
        watcher: Watcher = NO_WATCHER,
        context: int = 0,
    ):
        """`reads_tokens`: whether this rank's stage is the first or the last; other stages only read tokens to find the
        ends of documents; `record`: file that records the corpus as it was when the job began; `records`: whether this
        rank writes it; `cache`: folder for tokens; `watcher`: observes how they are prepared; `context`: this rank's
        index among those that share each sample's sequence."""
        self.spec, self.replica, self.device = spec, replica, device
        self._runs, self._context = runs_of(spec.layout, spec.model.sequence_length, context), context
        self._separate_documents = spec.data.documents == "apart"
        self.reads_tokens = reads_tokens or self._separate_documents
        self.plan = BatchPlan(spec.train)
        self.corpus = open_corpus(spec, cache, record, records, watcher)
        # The ends of conversations are known without a token for it.
        need_end = self._separate_documents and any(each.source != "chat" for each in spec.data.corpora)
        if need_end and self.corpus.end_of_document is None:
            raise DataError(
                "data.documents: apart needs to know the token that ends documents: set data.end_of_document, or the "
                "tokenizer that a megatron dataset was made with"
            )
        splits = splits_of(spec, self.corpus)
        training = [split[0] for split in splits]
        self.training_tokens, self.validation_tokens = sum(training), sum(split[1] for split in splits)
        shares = (1,) if spec.data.weights is None else integer_shares(spec.data.weights)
        shifts = spec.data.source != "chat"
        self.order = blended(shares, self.corpus.begins, training, spec.model.sequence_length, spec.train.seed, shifts)
        self.held_out = self._held_out([split[1] for split in splits], cache, record, records, watcher)
        """Held-out texts for validation losses; empty if there are none."""
        self._reading = threading.Lock()
        """Held by the only thread that reads."""
        self.skipped = SkippedSamples()
        """Skipped training samples; the same on all ranks."""

    def _held_out(
        self, tokens: list[int], cache: Path | None, record: Location | None, records: bool, watcher: Watcher
    ) -> tuple[HeldOut, ...]:
        """`tokens`: of each part of the corpus, the tokens that are held out."""
        train = self.spec.train
        if not train.validate_every:
            return ()
        order = self.order
        firsts = [begin + part.tokens for begin, part in zip(order.begins, order.parts, strict=True)]
        own = BlendedHeldOut(
            *(None, self.corpus, firsts[0], sum(tokens), train.validation_batches),
            tuple(zip(firsts, tokens, strict=True)),
            order.blend,
        )
        sets = validation_sets(self.spec, record, records, cache, watcher)
        return (own, *sets) if self.spec.data.validation_fraction else tuple(sets)

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1)."""
        return self._read(self.plan.samples(step), lambda place: self.order.start(self.skipped.sample(place)))

    def samples(self, step: int) -> list[range]:
        """All samples of step `step`, of all replicas."""
        return self.skipped.samples(self.plan.samples(step))

    def validation(self, held_out: HeldOut, batch: int) -> list[MicroBatch]:
        """The replica's micro-batches of validation batch `batch`: the text in order from its start. Windows past its
        end start again at its beginning."""
        length, size = self.spec.model.sequence_length, self.spec.train.global_batch_size
        samples = range(batch * size, (batch + 1) * size)
        return self._read(samples, lambda sample: held_out.start(sample, length), held_out.corpus)

    def _read(self, samples: range, start_of: Callable[[int], int], corpus: Corpus | None = None) -> list[MicroBatch]:
        """The replica's part of `samples`, whose windows start at `start_of` in the corpus (default: the job's
        order)."""
        parts = replica_micro_batches(samples, self.spec, self.replica)
        if not self.reads_tokens:
            whole = [MicroBatch(part) for part in parts]
        else:
            text = corpus or self.corpus
            with self._reading:
                whole = [self._micro_batch(text, part, [start_of(sample) for sample in part]) for part in parts]
        if self.spec.layout.exchange_size > 1:
            most = most_samples(samples, self.spec, self.replica, self._context)
            whole = [replace(batch, most_samples=count) for batch, count in zip(whole, most, strict=True)]
        return [_on_device(batch.part(self._runs), self.device) for batch in whole]

    def _micro_batch(self, corpus: Corpus, samples: range, starts: list[int]) -> MicroBatch:
        length = self.spec.model.sequence_length
        if not starts:
            nothing_sb = torch.empty(length, 0, dtype=torch.int64)
            documents = Documents((), length) if self._separate_documents else None
            return MicroBatch(samples, nothing_sb, nothing_sb, documents)
        windows_bs = np.stack([corpus.read(start, length + 1) for start in starts])
        tokens_sb = torch.from_numpy(windows_bs).t().contiguous()
        batch = MicroBatch(samples, tokens_sb[:-1], tokens_sb[1:])
        marks = [each for start in starts if (each := corpus.marks(start, length + 1)) is not None]
        if marks:
            return with_marks(batch, marks, self._separate_documents)
        end = self.corpus.end_of_document if self._separate_documents else None
        return batch if end is None else with_separate_documents(batch, end)


class Prefetch:
    """Returns the micro-batches of a step and prepares those of the next one on a thread meanwhile, so that no step
    waits for a disk. For use by one thread."""

    def __init__(self, batches: Batches, last_step: int):
        """`last_step`: the last step to prepare."""
        self._batches, self._last_step = batches, last_step
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, SkippedSamples, Future[list[MicroBatch]]] | None = None
        """Step, the samples that were skipped when it was begun, and its future result."""

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1), whichever step was requested before. Raises the errors
        of `Batches.training`, not before the step is requested."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (step, self._batches.skipped):
            made = ahead[2].result()
        else:
            made = self._batches.training(step)
        if step < self._last_step:
            self._ahead = step + 1, self._batches.skipped, self._thread.submit(self._batches.training, step + 1)
        return made

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
