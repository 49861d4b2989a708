"""Experts spread over ranks: loss, norm and every gradient are those of a plain model on one machine, whatever the
layout, the exchange, the schedule and what is recomputed."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from engine_specs import document
from job_cover import SCHEDULES, Factors, NotWanted, Row, cover
from plain_gpt import random_weights
from plain_lora import adapted_model
from rank_programs import assemble, evaluate, light, run_steps

from manta.workers.spec.parameters import frozen_names
from manta.workers.spec.reading import parse_job_spec

MOE = {"experts": 6, "per_token": 2, "ffn_hidden_size": 12, "first_dense": 1, "balance": {"weight": 0.05}}
SHARED = {"shared": 1, "shared_gate": True, "score": "sigmoid", "router_z_loss": 0.01}
FACTORS: Factors = {
    "expert": (2, 3, 6),
    "dispatch": ("all_gather", "all_to_all"),
    "schedule": tuple(SCHEDULES),
    "layout": ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1)),
    "data": (1, 2, 3, 4, 6),
    "context_method": (None, "all_gather", "all_to_all", "ring"),
    "sequence_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "zero": (1, 0),
    "moe": ("plain", "shared"),
    # Samples that replicas lack of equally many micro-batches of two.
    "missing": (0, 1, 3),
    "more": ("nothing", "frozen", "lora", "offload", "offload_layers"),
}
"""Tensor and pipeline size are `layout`."""
FEWER: Factors = FACTORS | {
    "layout": ((1, 1), (2, 1), (1, 2), (2, 2)),
    "data": (1, 2, 3),
    "context_method": (None, "all_gather"),
    "missing": (0, 3),
    "more": ("nothing", "frozen", "offload"),
    "schedule": ("1f1b", "interleaved", "zb-v"),
}
"""What is not left to the soak."""
MORE: dict[str, dict[str, Any]] = {
    "frozen": {"train": {"frozen": ["layers.1.mlp.experts.0", "layers.2"]}},
    "lora": {"train": {"lora": {"rank": 2, "targets": ["q", "v"]}}},
    "offload": {"train": {"optimizer": {"offload": True, "beta1": 0.0, "clip_norm": 0.0}}},
    "offload_layers": {"offload_layers": 1},
}


def made(row: Row) -> dict[str, Any]:
    """The row's job. Raises SpecError, NotWanted."""
    (tensor, pipeline), chunks = row["layout"], SCHEDULES[row["schedule"]]
    context = 1 if row["context_method"] is None else 2
    if tensor * pipeline * row["data"] * context > 8 or (pipeline == 1 and row["schedule"] != "1f1b"):
        raise NotWanted("more shows nothing new")
    given: dict[str, Any] = {
        **{key: row[key] for key in ("data", "expert", "schedule", "context_method", "recompute", "zero")},
        "tensor": tensor, "pipeline": pipeline, "virtual_stages": chunks, "context": context,
        "sequence_parallel": row["sequence_parallel"] and tensor > 1, "moe": SHARED if row["moe"] == "shared" else {},
        "sequences": 4 * pipeline * row["data"] - row["missing"], **MORE.get(row["more"], {}),
    }  # fmt: skip
    one = job(given, row["dispatch"])
    parse_job_spec(one)
    return one


OUTSIDE = ("sequences", "moe", "train")


def job(given: dict[str, Any], dispatch: str | None) -> dict[str, Any]:
    """One step of a small model without momentum, so that the first moment is the gradient itself."""
    parallel = {key: value for key, value in given.items() if key not in OUTSIDE}
    tensor = parallel.get("tensor", 1)
    heads = {"heads": tensor, "kv_heads": tensor} if tensor == 3 else {"heads": 4, "kv_heads": 2}
    if parallel.get("context_method") == "all_to_all":
        heads["kv_heads"] = 4
    train = {
        "steps": 1,
        "global_batch_size": given.get("sequences", 8),
        "micro_batch_size": 2,
        "optimizer": {"beta1": 0.0, "clip_norm": 0.0},
    }
    return document(
        model={
            "family": "llama", "layers": 4, "hidden_size": 12, "ffn_hidden_size": 24, "head_dim": 4, **heads,
            "vocabulary_size": 256, "moe": {**MOE, **given.get("moe", {})},
        },
        train=train | given.get("train", {}),
        parallel={"bucket_megabytes": 0.003, **parallel, "expert_dispatch": dispatch},
    )  # fmt: skip


def windows(sequences: int) -> torch.Tensor:
    """A global batch [B, 9]."""
    return torch.randint(1, 256, (sequences, 9), generator=torch.Generator().manual_seed(sequences))


def reference(one: dict[str, Any]):
    """(weights, loss, norm, gradients) of the plain model, in fp64."""
    spec = parse_job_spec(one)
    model = adapted_model(spec).double()
    weights = random_weights(spec, spread=0.1, model=model)
    model.load(weights)
    loss = model.loss(windows(spec.train.global_batch_size))
    (loss + model.balance_loss()).backward()
    assert model.margin() > 1e-6, "no token is between two experts"
    trained = ((name, each) for name, each in model.named_parameters() if name not in frozen_names(spec))
    gradients = {name: each.grad for name, each in trained if each.requires_grad}
    norm = math.sqrt(sum(each.square().sum().item() for each in gradients.values()))
    return weights, loss.item(), norm, gradients


@cache
def jobs(soak: bool = False) -> list[tuple[Row, dict[str, Any]]]:
    """Every choice of every factor beside every other one, as far as rules allow."""
    return cover(FACTORS if soak else FEWER, made)


def test_jobs_with_spread_experts_meet_every_choice():
    for soak, factors in ((True, FACTORS), (False, FEWER)):
        for name, values in factors.items():
            assert {row[name] for row, _ in jobs(soak)} == set(values), name


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_gradients_with_spread_experts_equal_those_of_a_plain_model(ranks, soak, part):
    for row, one in jobs(soak)[part::8]:
        compare(ranks, row, one)


@pytest.mark.parametrize(
    ("given", "dispatch"),
    [
        ({"expert": 2}, None),
        ({"expert": 2, "data": 2, "zero": 0, "sequence_parallel": False, "sequences": 7}, None),
        ({"expert": 4, "data": 2, "sequences": 7, "recompute": "full", **MORE["frozen"]}, "all_gather"),
        ({"expert": 4, "data": 2, "sequences": 7, "moe": SHARED, "recompute": "selective"}, "all_to_all"),
        ({"expert": 4, "pipeline": 2, "data": 2, "schedule": "zb-v", "virtual_stages": 2, "moe": SHARED}, "all_to_all"),
        ({"expert": 4, "data": 2, "context": 2, "context_method": "ring"}, "all_gather"),
    ],
)
def test_whole_experts_on_each_of_two_tensor_ranks_equal_those_of_a_plain_model(ranks, given, dispatch):
    moe = {"experts": 8, "ffn_hidden_size": 9, **given.get("moe", {})}  # which two ranks could not share
    moe |= {"shared_ffn_hidden_size": 10} if "shared" in moe else {}
    compare(ranks, given, job({"tensor": 2, "expert_tensor": 1, "sequences": 8, **given, "moe": moe}, dispatch))


def compare(ranks: Any, row: Row, one: dict[str, Any]) -> None:
    """Loss, norm, gradients and validation loss of a job with those of the plain model."""
    weights, loss, norm, gradients = reference(one)
    spec, batch = parse_job_spec(one), windows(one["train"]["global_batch_size"])
    by_rank = ranks.run(spec.layout, run_steps, [one], [light(weights)], [[batch]], torch.float64)
    for (steps,) in by_rank:
        assert steps.losses == [pytest.approx(loss, rel=1e-10)], row
        assert steps.grad_norms == [pytest.approx(norm, rel=1e-10)], row
    whole = assemble(gradients, [placed for (steps,) in by_rank for placed in steps.gradients])
    for name, expected in gradients.items():
        assert (whole[name] - expected).norm() <= 1e-10 * expected.norm() + 1e-13 * norm, (name, row)
    if row.get("recompute", "none") != "none":
        return  # which validation never does
    validated = ranks.run(spec.layout, evaluate, one, light(weights), batch)
    assert validated == [pytest.approx(loss, rel=1e-10)] * len(validated), row
