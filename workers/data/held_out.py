"""Text that is not trained on: what a validation loss is measured with."""

from __future__ import annotations

from dataclasses import dataclass

from workers import metric_names
from workers.config import JobSpec
from workers.data.corpus import ByteCorpus
from workers.data.corpus_record import as_recorded
from workers.data.sources import check_validation_set, corpus_files
from workers.storage.places import Place


@dataclass(frozen=True)
class HeldOut:
    """Windows of one sequence each, end to end, which are read in their order."""

    name: str | None
    """Of the validation set; None: the last part of the training corpus."""
    corpus: ByteCorpus
    first: int
    """First token of the text."""
    tokens: int
    """Tokens in it."""
    most_batches: int
    """Global batches in one validation, where there is text for so many."""

    @property
    def metric(self) -> str:
        """Name of its loss in the metrics."""
        return metric_names.validation_loss(self.name)

    def windows(self, length: int) -> int:
        """Sequences of `length` tokens, with the targets of each."""
        return (self.tokens - 1) // length

    def batches(self, spec: JobSpec) -> int:
        """Global batches in one validation: as many as are asked for, or fewer where the text is short."""
        whole = max(1, self.windows(spec.model.sequence_length) // spec.train.global_batch_size)
        return min(self.most_batches, whole)

    def start(self, sample: int, length: int) -> int:
        """First token of sequence number `sample`; past the end of the text it begins anew."""
        return self.first + (sample % self.windows(length)) * length


def validation_sets(spec: JobSpec, record: Place | None, records: bool) -> list[HeldOut]:
    """The validation sets of a job. `record`: the file that says what the training corpus was when the job began; those
    of validation sets lie beside it. Raises DataError where one does not do."""
    sets = []
    for each in spec.data.validation:
        files = corpus_files(spec.data.corpus_of(each))
        if record is not None:
            files = as_recorded(files, record.parent / f"validation-{each.name}.json", records)
        corpus = ByteCorpus(files)
        check_validation_set(spec, each, len(corpus))
        sets.append(HeldOut(each.name, corpus, 0, len(corpus), each.batches or spec.train.validation_batches))
    return sets
