"""GPipe, 1F1B, interleaving and ZB-V give the gradients that torch.distributed.pipelining gives for the same layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import document
from plain_gpt import random_weights
from rank_programs import gradients_of, run_steps
from torch_pipeline_programs import torch_pipeline

from manta.workers.spec.reading import parse_job_spec

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


def job(schedule: str, virtual_stages: int, stages: int, micro_batches: int, tied: bool) -> dict[str, Any]:
    """One step of an uneven number of layers, without momentum: the first moment is the gradient."""
    return document(
        model={"layers": stages * virtual_stages + 1, "hidden_size": 16, "tie_embeddings": tied},
        train={
            "steps": 1,
            "global_batch_size": 2 * micro_batches,
            "micro_batch_size": 2,
            "optimizer": {"beta1": 0.0, "clip_norm": 0.0},
        },
        parallel={"pipeline": stages, "schedule": schedule, "virtual_stages": virtual_stages},
    )


CASES = [("gpipe", 1, 4), ("1f1b", 1, 4), ("interleaved", 2, 4), ("interleaved", 3, 2), ("zb-v", 2, 2), ("zb-v", 2, 4)]
IN_SOAK = [("gpipe", 1, 2), ("1f1b", 1, 2), ("interleaved", 2, 2), ("interleaved", 3, 4)]


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "stages"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.soak) for each in IN_SOAK)],
)
def test_pipeline_gradients_equal_those_of_torch_pipelining(ranks, schedule, virtual_stages, stages):
    jobs = [job(schedule, virtual_stages, stages, 2 * stages, tied) for tied in (False, True)]
    layout = parse_job_spec(jobs[0]).layout
    weights = [random_weights(parse_job_spec(each)) for each in jobs]
    batch = torch.randint(256, (4 * stages, 9), generator=torch.Generator().manual_seed(stages))
    engine = ranks.run(layout, run_steps, jobs, weights, [[batch]] * 2, torch.float64)
    oracle = ranks.run(layout, torch_pipeline, ranks.port, TORCH_NAMES[schedule], jobs, weights, [batch] * 2)
    for number, start in enumerate(weights):
        compare([rank[number] for rank in engine], [rank[number] for rank in oracle], start, batch[:, 1:].numel())


def compare(engine: list[Any], oracle: list[Any], weights: dict[str, torch.Tensor], tokens: int) -> None:
    """The engine's means over tokens against the oracle's sums."""
    loss = sum(part for part, _ in oracle) / tokens
    assert [rank.losses[0] for rank in engine] == pytest.approx([loss] * len(engine), rel=1e-12)
    gradients = gradients_of(engine, weights)
    for name, gradient in gradients.items():
        # A tied embedding has a part of its gradient on each end of the pipeline.
        expected = torch.stack([part[name] for _, part in oracle if name in part]).sum(0) / tokens
        assert (gradient - expected).norm() <= 1e-10 * expected.norm(), name
