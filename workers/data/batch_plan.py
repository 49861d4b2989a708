"""Assigns global samples to steps, replicas and micro-batches. Pure Python.

The samples of a job are numbered from 0 in the order in which they are used; a step takes the next ones. If some are
skipped, the numbers here are positions in that order (`SkippedSamples`). With a ramp (MT-NLG's, arXiv:2201.11990,
section 3.2) the size of the global batch is a function of the samples consumed so far.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.workers.config import BUILT_IN_TOKENIZERS, BatchRamp, JobSpec, ParallelConfig, TrainConfig

_DECIDE = {
    "data": (
        "source", "paths", "weights", "tokenizer", "end_of_document", "special_tokens", "text_key", "loss",
        "validation_fraction",
    ),
    "model": ("sequence_length",),
    "train": ("seed", "global_batch_size", "batch_ramp"),
}  # fmt: skip
"""Keys that decide which samples there are, and which of them a step has."""


def changed_sample_keys(spec: JobSpec, before: Mapping[str, Any]) -> Iterator[str]:
    """Keys of `spec` due to which its steps have other samples than under the spec whose document was `before`, each
    with both values. A corpus may have moved as a whole; the files of the tokenizer and of the chat template are
    compared by content, elsewhere."""
    now = spec.model_dump(mode="json")
    for section, keys in _DECIDE.items():
        stored, defaults = before.get(section, {}), type(getattr(spec, section)).model_fields
        for key in keys:
            old, new = stored.get(key, defaults[key].default), now[section][key]
            are_files = key == "tokenizer" and old not in BUILT_IN_TOKENIZERS and new not in BUILT_IN_TOKENIZERS
            has_moved = key == "paths" and _within(old) == _within(new)
            if old != new and not are_files and not has_moved:
                yield f"{section}.{key} (was {old}, is {new})"


def _within(paths: Sequence[str]) -> list[str]:
    """The paths within the folder that holds all of them."""
    whole = [Path(path).absolute() for path in paths]
    return [os.path.relpath(path, os.path.commonpath([each.parent for each in whole])) for path in whole]


@dataclass(frozen=True)
class Level:
    """Consecutive steps with the same batch size."""

    first_step: int
    """First step of the level, from 1."""
    first_sample: int
    """First sample of that step."""
    size: int
    """Sequences in each of its steps."""


class BatchPlan:
    """The batch sizes of a job, as a function of the step."""

    def __init__(self, train: TrainConfig):
        ramp = train.batch_ramp
        self.levels = [Level(1, 0, train.global_batch_size)] if ramp is None else _levels(ramp, train.global_batch_size)

    def size(self, step: int) -> int:
        """Sequences in step `step` (from 1)."""
        return self._level(step).size

    def first_sample(self, step: int) -> int:
        """Number of the first sample of step `step`; also the samples consumed by all steps before it."""
        level = self._level(step)
        return level.first_sample + (step - level.first_step) * level.size

    def samples(self, step: int) -> range:
        """All samples of step `step`."""
        first = self.first_sample(step)
        return range(first, first + self.size(step))

    def _level(self, step: int) -> Level:
        return self.levels[bisect_right(self.levels, step, key=lambda level: level.first_step) - 1]


def _levels(ramp: BatchRamp, largest: int) -> list[Level]:
    """Increment i begins with the first step at which i/n of the ramp's samples have been consumed, n being the number
    of increments."""
    increments = (largest - ramp.start) // ramp.increment
    levels = [Level(1, 0, ramp.start)]
    for number in range(1, increments + 1):
        last, size = levels[-1], ramp.start + number * ramp.increment
        threshold = -(-number * ramp.samples // increments)
        steps = max(0, -(-(threshold - last.first_sample) // last.size))
        level = Level(last.first_step + steps, last.first_sample + steps * last.size, size)
        if steps == 0:  # one step has passed more than one threshold
            levels.pop()
        levels.append(level)
    return levels


def replica_share(samples: range, replicas: int, replica: int) -> range:
    """The contiguous part of a global batch that `replica` processes; if it does not divide evenly, the first replicas
    get one more."""
    share, rest = divmod(len(samples), replicas)
    start = samples.start + replica * share + min(replica, rest)
    return range(start, start + share + (1 if replica < rest else 0))


def micro_batches(samples: range, size: int) -> list[range]:
    """A replica's part of a batch, divided into micro-batches of `size`; the last one may be smaller."""
    return [range(first, min(first + size, samples.stop)) for first in range(samples.start, samples.stop, size)]


def replica_micro_batches(samples: range, spec: JobSpec, replica: int) -> list[range]:
    """The micro-batches of a global batch that `replica` runs. With `train.deterministic: elastic` the global batch is
    first divided into micro-batches, so that they are the same for every number of replicas; otherwise it is first
    divided among replicas. With expert parallelism ranks compute micro-batches in lockstep, so a replica has as many as
    others have: the last ones may be without samples."""
    size = spec.train.micro_batch_size
    if spec.train.deterministic == "layout":
        share = replica_share(samples, spec.layout.data, replica)
        mine = micro_batches(share, size)
        if spec.layout.exchange_size > 1:
            most = len(micro_batches(replica_share(samples, spec.layout.data, 0), size))
            mine += [range(share.stop, share.stop)] * (most - len(mine))
        return mine
    whole = micro_batches(samples, size)
    return [whole[leaf] for leaf in leaf_share(len(whole), spec.layout, replica)]


def most_micro_batches(sequences: int, spec: JobSpec) -> int:
    """The number of micro-batches of the replica that runs the most of a global batch of `sequences`."""
    return len(replica_micro_batches(range(sequences), spec, 0))


def most_samples(samples: range, spec: JobSpec, replica: int, context: int) -> list[int]:
    """For each micro-batch of a rank, the most samples that it has on any rank over which experts are spread together
    with this one's."""
    layout = spec.layout
    own = replica * layout.context + context
    first = own - own % layout.exchange_size
    replicas = {holder // layout.context for holder in range(first, first + layout.exchange_size)}
    each = [replica_micro_batches(samples, spec, other) for other in replicas]
    return [max(map(len, together)) for together in zip(*each, strict=True)]


def leaf_share(leaves: int, layout: ParallelConfig, replica: int) -> range:
    """Which of a global batch's micro-batches `replica` runs with `train.deterministic: elastic`: neighbours, or, where
    gradients are reduced for each micro-batch, one of every `layout.data` neighbours."""
    if layout.zero >= 2:
        return range(replica, leaves, layout.data)
    unit = layout.micro_batch_unit
    own_range = replica_share(range(leaves // unit), layout.data, replica)
    return range(own_range.start * unit, own_range.stop * unit)
