"""Which stage has which layer changes no number: losses and weights of a training are those of even stages, to the
bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import document
from plain_gpt import random_weights
from rank_programs import assemble, train_job

from manta.workers.spec.reading import parse_job_spec

LAYERS = 8
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2, "stage_layers": [3, 5]},
    "1f1b, two replicas": {"pipeline": 2, "data": 2, "stage_layers": [7, 1], "bucket_megabytes": 0.004},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "stage_layers": [3, 1, 3, 1]},
    "zb-h1": {"pipeline": 2, "schedule": "zb-h1", "stage_layers": [6, 2], "tensor": 2},
    "zb-v": {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, "stage_layers": [1, 2, 4, 1]},
    "full recomputation": {"pipeline": 4, "recompute": "full", "recompute_every": 2, "stage_layers": [1, 3, 3, 1]},
}


def job(corpus: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Four steps with validation. No clipping: the sum of a norm is in the order of the ranks."""
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 2, "clip_norm": 0.0}
    train = {"steps": 4, "validate_every": 2, "micro_batch_size": 2, "optimizer": optimizer}
    return document(
        model={"layers": LAYERS, "hidden_size": 16},
        data={"paths": [corpus], "validation_fraction": 0.1},
        train=train,
        parallel=parallel,
    )


def outcome(ranks: Any, document: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses of all steps; weights and moments as the model has them, whoever holds them."""
    by_rank = ranks.run(parse_job_spec(document).layout, train_job, document)
    rows = [(row["loss"], row.get("validation_loss")) for row in by_rank[0].rows]
    weights = random_weights(parse_job_spec(document))
    state: dict[str, torch.Tensor] = {}
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        parts = [each[1:] for rank in by_rank for each in rank.rectangles if each[0] == kind]
        state |= {f"{kind}.{name}": values for name, values in assemble(weights, parts).items()}
    return rows, state


@pytest.mark.parametrize(
    "name", [name if name in ("1f1b", "zb-v") else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_uneven_stages_give_the_bits_of_even_ones(ranks, corpus, name):
    uneven = CASES[name]
    even = {key: value for key, value in uneven.items() if key != "stage_layers"}
    (rows, state), (others, expected) = (outcome(ranks, job(corpus, parallel)) for parallel in (uneven, even))
    assert rows == others
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
