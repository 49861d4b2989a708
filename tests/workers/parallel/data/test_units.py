"""ZeRO 2 and 3: the bits of their sums, and what a step gathers and reduces. Elastic bits are in test_elastic_sums.py,
gradients are compared with a plain model's in test_gradients.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from engine_specs import axes, document
from fake_rank import FakeRank, pretended_gpu
from plain_gpt import random_weights
from rank_programs import Steps, assemble, run_steps

from manta.workers.accounting.unit_bytes import gathered_elements, reduced_elements
from manta.workers.spec.reading import parse_job_spec

UNTIED = {"tie_embeddings": False}


def job(
    zero: int, data: int = 2, micro_batches: int = 1, model: Any = None, parallel: Any = None, **train: Any
) -> dict[str, Any]:
    """Three steps without clipping, whose norm is summed over other parts by each stage."""
    numbers = {"steps": 3, "global_batch_size": 2 * data * micro_batches, "micro_batch_size": 2}
    return document(
        model={"layers": 4, "hidden_size": 16, **(model or {})},
        train={**numbers, "optimizer": {"clip_norm": 0.0}, **train},
        parallel={**axes((1, 1, data)), "zero": zero, **(parallel or {})},
    )


def trained(ranks: Any, spec: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and all weights."""
    parsed = parse_job_spec(spec)
    start = random_weights(parsed, spread=0.03)
    generator = torch.Generator().manual_seed(7)
    windows = [torch.randint(256, (parsed.train.global_batch_size, 9), generator=generator) for _ in range(3)]
    by_rank: list[list[Steps]] = ranks.run(parsed.layout, run_steps, [spec], [start], [windows], torch.float32)
    placed = [each for (steps,) in by_rank for each in steps.parameters]
    return by_rank[0][0].losses, assemble(start, placed)


CASES: dict[str, dict[str, Any]] = {
    "tied": {"data": 3},
    "untied, whole layers recomputed": {"model": UNTIED, "parallel": {"recompute": "full"}},
    "state and activations on the host": {
        "parallel": {"offload_layers": 4}, "optimizer": {"clip_norm": 0.0, "offload": True},
    },
    "a few logits": {"head_tokens": 7, "z_loss": 1e-4},
    "frozen below and between": {"frozen": ["embedding", "layers.0-1", "layers.2.mlp"], "model": UNTIED},
    "only the output layer": {"frozen": ["embedding", "layers", "final_norm"], "model": UNTIED},
    "only vectors": {"frozen": ["embedding", "*.qkv", "*.output", "*.up", "*.down"]},
    "one layer": {"model": {"layers": 1}},
    "several micro-batches, one sequence less": {"data": 3, "micro_batches": 3, "global_batch_size": 17},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_stages_of_zero_train_the_same_weights(ranks, name):
    """To the bit where there is one micro-batch; 2 and 3 in any case."""
    losses, weights = zip(*(trained(ranks, job(zero, **CASES[name])) for zero in (1, 2, 3)), strict=True)
    for zero, other in ((2, 3), (1, 3)):
        same_bits = zero == 2 or "micro_batches" not in CASES[name]
        assert losses[zero - 1] == (losses[other - 1] if same_bits else pytest.approx(losses[other - 1], rel=1e-6))
        for key, values in weights[zero - 1].items():
            same = torch.equal if same_bits else lambda a, b: torch.allclose(a, b, atol=1e-5)
            assert same(values, weights[other - 1][key]), key


@pytest.mark.parametrize(
    "case",
    [
        job(3, micro_batches=3, parallel={"recompute": "full"}),
        job(3, micro_batches=2, model=UNTIED | {"layers": 5}),
        job(3, micro_batches=2, frozen=["embedding", "layers.0-1", "layers.2.mlp"], model=UNTIED),
        job(3, model={"layers": 1}),
        job(3, micro_batches=2, lora={"rank": 8}, parallel={"tensor": 2, "context": 2, "context_method": "ring"}),
    ],
    ids=["tied, recomputed", "untied", "frozen", "one layer", "adapters in a ring"],
)
def test_a_step_gathers_and_reduces_the_accounted_elements(case):
    """A layer once forward and once backward, recomputed or not, and less while it is still there."""
    spec = parse_job_spec(case)
    with pretended_gpu():
        rank = FakeRank(spec, 1)
        comm, moved = rank.comm, {"gather": 0, "reduce": 0}
        gather, reduce = comm.start_all_gather, comm.start_reduce_scatter

        def counted_gather(axis, tensor, out=None):
            if axis == comm.grid.holders:
                moved["gather"] += len(out)
            return gather(axis, tensor, out)

        def counted_reduce(axis, tensor, out=None):
            if axis == comm.grid.holders:
                moved["reduce"] += len(tensor)
            return reduce(axis, tensor, out)

        with (
            mock.patch.object(comm, "start_all_gather", counted_gather),
            mock.patch.object(comm, "start_reduce_scatter", counted_reduce),
        ):
            rank.step()
    start, end = rank.engine.flat.buckets[-1]  # the tail, of which there are both at the end
    assert moved["gather"] - (end - start) == pytest.approx(gathered_elements(spec, spec.micro_batches), rel=0.05)
    assert moved["reduce"] - (end - start) == pytest.approx(reduced_elements(spec, spec.micro_batches), rel=0.05)
