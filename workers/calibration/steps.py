"""Times of whole steps on one rank; less products and attention, they show what operations and moved bytes take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from manta.workers.calibration.clock import median_seconds
from manta.workers.calibration.measurements import BusyTime, StepSeconds
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.spec.reading import parse_job_spec

BUSY_ROUNDS, BUSY_SECONDS = 3, 0.5

# (layers, hidden, heads, sequence, micro-batch, micro-batches, vocabulary)
ON_CPU = (
    (4, 32, 2, 16, 1, 8, 256),  # operations
    (2, 64, 2, 64, 2, 8, 256),
    (2, 128, 4, 128, 2, 4, 1024),
    (4, 256, 4, 128, 4, 2, 512),
    (2, 256, 8, 256, 1, 4, 8192),  # the loss
    (2, 512, 8, 32, 1, 1, 512),  # the optimizer
    (2, 512, 8, 256, 2, 2, 512),
)
BUSY = (2, 512, 8, 64, 1, 8, 512)  # arithmetic and memory alike

Shape = tuple[int, int, int, int, int, int, int]


def document_of(shape: Shape, precision: str, **model: Any) -> dict[str, Any]:
    """A job of one rank with this shape; `model`: further keys of that section."""
    layers, hidden, heads, sequence, size, count, vocabulary = shape
    model |= {"layers": layers, "hidden_size": hidden, "heads": heads, "sequence_length": sequence}
    return {
        "model": model | {"vocabulary_size": vocabulary},
        "data": {"source": "megatron", "paths": ["corpus.bin"]},
        "train": {
            "steps": 1000,
            "global_batch_size": size * count,
            "micro_batch_size": size,
            "precision": precision,
            "seed": 1234,
        },
    }


def layout_document(**parallel: int) -> dict[str, Any]:
    """A minimal job with this number of ranks along each axis; a separate program decides what the ranks do."""
    layers, batch = parallel.get("pipeline", 1), parallel.get("data", 1)
    return document_of((layers, 64, 8, 16, 1, batch, 256), "fp32") | {"parallel": parallel}


def random_batch(spec: JobSpec, device: torch.device) -> list[MicroBatch]:
    """A replica's micro-batches, of random tokens."""
    size, length = spec.train.micro_batch_size, spec.model.sequence_length
    batch = []
    for number in range(spec.micro_batches):
        tokens_sb = torch.randint(spec.vocabulary_size, (length + 1, size), device=device)
        batch.append(MicroBatch(range(number * size, (number + 1) * size), tokens_sb[:-1], tokens_sb[1:]))
    return batch


class OneRank:
    """The engine of a job of one rank."""

    def __init__(self, document: dict[str, Any], device: torch.device):
        spec = parse_job_spec(document)
        self._engine = Engine(spec, Comm(RankGrid(spec.layout), 0, device))
        self._engine.initialise(spec.train.seed)
        self._batch, self._sequences = random_batch(spec, device), spec.train.global_batch_size

    def step(self) -> None:
        """One optimizer step."""
        self._engine.step(self._batch, self._sequences, 1e-4, 0)


def step_times(device: torch.device, documents: Sequence[dict[str, Any]] | None = None) -> list[StepSeconds]:
    """Step times of these jobs of one rank; by default of ON_CPU, whose time is dominated by different costs."""
    chosen = documents or [document_of(shape, "fp32") for shape in ON_CPU]
    return [StepSeconds(each, median_seconds(OneRank(each, device).step, device, 0.5)) for each in chosen]


def busy_seconds(comm: Comm, _: JobSpec, counts: Sequence[int]) -> list[list[float]]:
    """Program for ranks: for each of `counts`, the seconds of a step of a job of one rank while that many ranks run
    such a job each and the others wait; empty if this rank waits. The counts take turns, BUSY_ROUNDS times, since the
    machine may be slower for a while."""
    rank = OneRank(document_of(BUSY, "fp32"), comm.device)
    rank.step()
    taken: list[list[float]] = [[] for _ in counts]
    for _round in range(BUSY_ROUNDS):
        for at, count in enumerate(counts):
            comm.barrier()
            if comm.rank < count:
                taken[at].append(median_seconds(rank.step, comm.device, BUSY_SECONDS))
    comm.barrier()
    return taken


def as_busy(counts: Sequence[int], by_rank: Sequence[list[list[float]]]) -> list[BusyTime]:
    """Combines the measurements of all ranks: the mean over ranks for each round, and the median of these."""
    rows = []
    for at, count in enumerate(counts):
        rounds = [statistics.mean(rank[at][each] for rank in by_rank[:count]) for each in range(BUSY_ROUNDS)]
        rows.append(BusyTime(count, statistics.median(rounds)))
    return rows
