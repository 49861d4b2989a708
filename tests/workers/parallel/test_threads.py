"""Two threads a rank change bits once, and no more than that: the same layout gives the same ones, whether or not a
rank goes on in another process, and where replicas are to change nothing they do not.

Tensors are large enough to be cut among threads: torch does that above 32,768 elements.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document
from rank_programs import START, Trained, train_with_threads

from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume

STEPS, MIDDLE = 3, 2
LAYOUTS = ((1, 1, 1), (2, 1, 2), (1, 2, 1))
MORE_LAYOUTS = ((2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))


def job(corpus: str, layout: tuple[int, int, int], threads: int, **train: Any) -> dict[str, Any]:
    """A job with dropout that validates after each step."""
    return document(
        model={"layers": 2, "hidden_size": 64, "sequence_length": 64, "dropout": 0.1},
        data={"paths": [corpus], "validation_fraction": 0.2},
        train={
            "steps": STEPS, "global_batch_size": 16, "micro_batch_size": 4, "validate_every": 1,
            "validation_batches": 1, **train,
        },
        parallel=axes(layout),
        resources={"threads": threads},
    )  # fmt: skip


def same(one: list[Trained], other: list[Trained]) -> bool:
    """Whether numbers of all steps, and each rank's weights and moments, have the same bits."""
    parts, other_parts = ([part for rank in ranks for part in rank.state.values()] for ranks in (one, other))
    return one[0].statistics == other[0].statistics and all(map(torch.equal, parts, other_parts))


def validation_losses(trained: list[Trained]) -> set[tuple[int, float]]:
    """By step."""
    return {(row["step"], row["validation_loss"]) for row in trained[0].rows}


def test_the_number_of_threads_does_change_bits(ranks, corpus):
    one, two = (ranks.run(ParallelConfig(), train_with_threads, job(corpus, (1, 1, 1), threads)) for threads in (1, 2))
    assert not same(one, two), "or the tests below would show nothing"


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.soak) for layout in MORE_LAYOUTS)]
)
def test_training_has_the_same_bits_if_ranks_continue_in_other_trainers(ranks, corpus, tmp_path, layout):
    described, shape = job(corpus, layout, 2), ParallelConfig(**axes(layout))
    clean = ranks.run(shape, train_with_threads, described)
    snapshots = str(tmp_path / "snapshots")
    begun = ranks.run(shape, train_with_threads, described, None, snapshots, START, MIDDLE)
    ended = ranks.run(shape, train_with_threads, described, None, snapshots, Resume("snapshot", MIDDLE))
    for before, after in zip(begun, ended, strict=True):
        after.statistics[:0] = before.statistics
    assert same(ended, clean)
    assert validation_losses(ended) == validation_losses(clean)


def test_elastic_sums_with_threads_have_the_same_bits_for_any_replica_count(ranks, corpus):
    alone, shared = (
        ranks.run(
            ParallelConfig(data=replicas),
            train_with_threads,
            job(corpus, (1, 1, replicas), 2, deterministic="elastic"),
        )
        for replicas in (1, 2)
    )
    assert alone[0].statistics == shared[0].statistics
    assert validation_losses(alone) == validation_losses(shared)
    assert all(torch.equal(rank.parameters, alone[0].parameters) for rank in shared)
