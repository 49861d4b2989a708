"""Activation bytes by arithmetic are the papers': its table 2, its totals of a rank; and what autograd really holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import papers
import pytest
import torch
from engine_specs import spec
from one_layer import held_bytes, lone_rank
from schedule_sizes import most_in_flight

from manta.workers.accounting.activation_bytes import (
    bytes_of_rank,
    chunk_bytes,
    deferred_bytes,
    layer_terms,
    saved_terms,
)
from manta.workers.config import JobSpec, ModelConfig
from manta.workers.engine import Engine
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute import Recompute
from manta.workers.parallel.tensor.cross_entropy import vocabulary_parallel_cross_entropy
from manta.workers.parallel.tensor.dropout import sample_keys
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.schedules.action_lists import training_actions


def layer_bytes(job_spec: JobSpec, modules: Collection[str] = ()) -> int:
    """Bytes that a layer saves, if `modules` are recomputed."""
    return sum(layer_terms(job_spec, 0, modules).values())


MODELS = ("22B", "175B", "530B", "1T")


def shape(name: str) -> ModelConfig:
    """A model of table 3 of arXiv:2205.05198."""
    row = papers.MODELS[name]
    return ModelConfig(
        layers=row["layers"], hidden_size=row["hidden"], heads=row["heads"], sequence_length=2048, vocabulary_size=51200
    )


def evaluated(formula: str, model: ModelConfig, micro_batch: int, tensor: int) -> float:
    """A formula of the papers' tables."""
    names = {"s": model.sequence_length, "h": model.hidden_size, "a": model.heads, "b": micro_batch, "t": tensor}
    return eval(formula, {}, names)


def large(name: str, dropout: float = 0.1, **parallel: Any) -> JobSpec:
    """A model of table 3 with the layout and batch that it was measured with, unless told otherwise."""
    row = papers.MODELS[name]
    interleaves = row["interleave_m"] > 1
    model = {name: value for name, value in shape(name).model_dump().items() if value is not None}
    layout = {
        "tensor": row["tp"],
        "pipeline": row["pp"],
        "virtual_stages": row["interleave_m"],
        "schedule": "interleaved" if interleaves else "1f1b",
    }
    return spec(
        model=model | {"dropout": dropout},
        train={
            "precision": "bf16",
            "attention": "explicit",
            "micro_batch_size": row["micro_batch"],
            "global_batch_size": row["global_batch"],
        },
        parallel=layout | parallel,
    )


TABLE_2 = {
    "no parallelism": (1, None, "none"),
    "tensor parallel (baseline)": (8, False, "none"),
    "tensor + sequence parallel": (8, True, "none"),
    "tensor parallel + selective recompute": (8, False, "selective"),
    "tensor + sequence parallel + selective recompute": (8, True, "selective"),
    "full activation recomputation": (8, False, "full"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", TABLE_2)
def test_activation_terms_of_the_engine_add_up_to_table_2(row, name):
    """Apart from the statistics of norms, 16 bytes a token, and the keys of dropout."""
    tensor, split, recompute = TABLE_2[row]
    job_spec = large(name, tensor=tensor, sequence_parallel=split, recompute=recompute)
    size, outside = job_spec.train.micro_batch_size, 2048 // (tensor if split else 1)
    vectors = 0 if recompute == "full" else 16 * size * outside + 4 * size * job_spec.model.heads // tensor
    expected = evaluated(papers.LAYER_BYTES[row], job_spec.model, size, tensor)
    assert sum(saved_terms(job_spec, 0, recompute).values()) == pytest.approx(expected + vectors, rel=1e-12)
    assert vectors < 5e-4 * expected


def test_modules_leave_out_their_own_tensors():
    """Of 34 s b h: 4 without the norms' outputs, 8 without the MLP's activation; of 5 a s^2 b: all."""
    job_spec = large("22B", tensor=1, sequence_parallel=None)
    sbh = 2048 * 4 * 6144
    everything = layer_bytes(job_spec)
    assert everything - layer_bytes(job_spec, ["norm"]) == 4 * sbh
    assert everything - layer_bytes(job_spec, ["mlp_activation"]) == 8 * sbh
    assert everything - layer_bytes(job_spec, ["core_attention"]) == 5 * 64 * 2048**2 * 4
    assert layer_bytes(job_spec, ["core_attention", "norm", "mlp_activation"]) == 22 * sbh + 16 * 2048 * 4 + 4 * 4 * 64


def test_activation_bytes_of_fused_attention_do_not_grow_with_squared_length():
    unfused = large("22B", dropout=0.0)
    sdpa = unfused.model_copy(update={"train": unfused.train.model_copy(update={"attention": "sdpa"})})
    assert layer_terms(sdpa)["log_sums"] == 4 * 4 * 64 // 8 * 2048
    assert layer_bytes(unfused) - layer_bytes(sdpa) == 2 * 64 // 8 * 2048**2 * 4 - layer_terms(sdpa)["log_sums"]
    assert layer_bytes(sdpa) - layer_bytes(sdpa, ["core_attention"]) == layer_terms(sdpa)["log_sums"]


@pytest.mark.parametrize("method", ["all_gather", "ring", "all_to_all"])
@pytest.mark.parametrize("modules", [(), ("norm", "mlp_activation")])
@pytest.mark.parametrize("family", [{"family": "gpt"}, {"family": "llama", "kv_heads": 8}])
def test_kept_activations_fall_by_the_context_size_to_the_byte(family, modules, method):
    """But for the result of attention by heads, which is kept in both forms."""
    shape = {"layers": 2, "hidden_size": 512, "heads": 16, "sequence_length": 1024} | family
    whole = layer_terms(spec(model=shape), modules=modules)
    for context in (2, 4, 8):
        part = layer_terms(spec(model=shape, parallel={"context": context, "context_method": method}), modules=modules)
        twice = part.pop("context_by_heads", 0)
        assert {name: context * size for name, size in part.items()} == whole
        assert (twice == part["context"]) if method == "all_to_all" else not twice


def _interleaving(stages: int, virtual_stages: int) -> float:
    """How much more the first stage holds."""
    return 1 + (stages - 1) / (stages * virtual_stages) if virtual_stages > 1 else 1.0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_first_stage_holds_the_papers_total(recompute, name):
    """arXiv:2205.05198, eq. 5 and section 4.3: p micro-batches of L/p layers, 1 + (p - 1)/(p m) times as much when
    interleaved; the embedding's dropout masks, s b h p / t, of which interleaving has 2 p - 1; without a pipeline also
    the output layer, whose logits the paper keeps in fp32, 4 s b v / t, and the engine in 16 bits."""
    job_spec = large(name, recompute=recompute, sequence_parallel=True)
    model, size, p, m = (
        job_spec.model,
        job_spec.train.micro_batch_size,
        job_spec.layout.pipeline,
        job_spec.layout.virtual_stages,
    )
    s, h, L, v, t = model.sequence_length, model.hidden_size, model.layers, model.vocabulary_size, 8
    sbh = s * size * h
    attention = 0 if recompute == "selective" else 5 * model.heads * s / h
    masks = 2 * p - 1 if m > 1 else p
    expected = sbh * L / t * (34 + attention) * _interleaving(p, m) + sbh * masks / t
    if p == 1:
        expected += sbh / t * 4 * (1 + v / h) - 2 * s * size * v / t
    held = [bytes_of_rank(job_spec, stage, job_spec.micro_batches) for stage in range(p)]
    assert held[0] == max(held) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("keep", [0, 1, 2, 9])
def test_rank_keeps_all_activations_of_the_given_number_of_micro_batches(kind, keep):
    """arXiv:2205.05198, appendix C."""
    job_spec = spec(
        train={"global_batch_size": 6},
        parallel={"pipeline": 2, "schedule": kind, "recompute": "full", "recompute_keep": keep},
    )
    for rank, actions in enumerate(training_actions(kind, 2, 1, 6)):
        most = most_in_flight(actions)
        whole, part = (chunk_bytes(job_spec, rank, recompute) for recompute in (False, True))
        assert bytes_of_rank(job_spec, rank, 6) == min(most, keep) * whole + max(0, most - keep) * part


def test_activation_bytes_of_zb_h1_count_micro_batches_whose_weight_pass_waits():
    """The last stage under ZB-H1: the passes of two micro-batches, the first of which waits for its weights' half."""
    job_spec = spec(train={"global_batch_size": 6}, parallel={"pipeline": 2, "schedule": "zb-h1"})
    assert bytes_of_rank(job_spec, 1, 6) == chunk_bytes(job_spec, 1, False) + deferred_bytes(job_spec, 1)


def test_activations_of_a_chunk_follow_the_recompute_policy_only_if_it_applies():
    """Layers 2 and 3 of a middle stage."""

    def held(applies: bool, **policy: Any) -> int:
        return chunk_bytes(spec(model={"layers": 6}, parallel={"pipeline": 3, **policy}), 1, applies)

    job, everything = spec(model={"layers": 6}, parallel={"pipeline": 3}), held(True)
    assert everything == 2 * layer_bytes(job)
    every_third = {"recompute": "full", "recompute_every": 3}
    assert held(True, **every_third) == layer_bytes(job) + sum(saved_terms(job, 0, "full").values()), (
        "of layer 3 only the input"
    )
    assert held(False, **every_third) == everything
    norms = {"recompute": "selective", "recompute_modules": ["norm"]}
    assert held(True, **norms) == 2 * layer_bytes(job, ["norm"]) < everything
    assert held(False, **norms) == everything


class _Holder(torch.autograd.Function):
    """Holds one tensor by autograd's own means, one by an attribute and one by a closure."""

    @staticmethod
    def forward(ctx, x):
        saved, attribute, closed_over = x + 1, x[:1] + 2, x[:2] + 3
        ctx.save_for_backward(saved, saved[1:])
        ctx.attribute, ctx.closure = attribute, lambda: closed_over
        return x + (saved + attribute + closed_over.sum()).sum()


def test_held_bytes_count_each_saved_storage_once():
    """Its result, what it needs no more and what was there before do not count."""
    source = torch.ones(8, requires_grad=True)
    held, edge = held_bytes(lambda: _Holder.apply(source))
    assert held == (8 + 1 + 2) * 4
    assert edge is not None
    assert held_bytes(lambda: (source * source).exp())[0] == 8 * 4
    assert held_bytes(lambda: source * 2.0)[0] == 0


def held_by_chunk(job_spec: JobSpec, rank: int, chunk: int, run: ForwardPass) -> int:
    """Bytes that autograd holds for one micro-batch in one chunk of `rank`, with its loss."""
    engine = Engine(job_spec, lone_rank(job_spec, rank))
    engine.flat.parameters.normal_(0.0, 0.02)
    module = engine.model.chunks[chunk]
    model, layout, size = job_spec.model, job_spec.layout, job_spec.train.micro_batch_size
    tokens = torch.zeros(model.sequence_length, size, dtype=torch.int64)
    split = layout.tensor if layout.sequence_parallel_on else 1
    source = torch.randn(model.sequence_length // split, size, model.hidden_size, requires_grad=True)

    def forward() -> torch.Tensor:
        y = module(tokens if module.is_first else source * 1.0, run)
        if not module.is_last:
            return y
        losses = vocabulary_parallel_cross_entropy(
            y.flatten(0, 1), tokens.flatten(), job_spec.vocabulary_size, engine.comm
        )
        return losses.sum()

    return held_bytes(forward)[0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": False},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "tensor": 2},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "stage_layers": [1, 3, 1, 2]},
    ],
    ids=str,
)
def test_measured_activations_match_the_accounting_for_every_chunk(layout, recompute):
    """Seven layers: the chunks are of different lengths; every second one is recomputed as a whole. Embedding and
    cross-entropy keep a few numbers more for each of the 16 tokens."""
    job_spec = spec(
        model={
            "layers": 7,
            "hidden_size": 32,
            "heads": 4,
            "sequence_length": 8,
            "dropout": 0.1,
            "vocabulary_size": 301,
        },
        train={"micro_batch_size": 2, "global_batch_size": 8},
        parallel={"recompute": recompute, "recompute_every": 2, **layout},
    )
    keys = sample_keys(0, range(2), torch.device("cpu"))
    run = ForwardPass(Positions.of(8), keys, Recompute.of(job_spec.layout))
    stages, virtual_stages, tensor = job_spec.layout.pipeline, job_spec.layout.virtual_stages, job_spec.layout.tensor
    for rank in range(stages):
        for chunk in range(virtual_stages):
            index = rank if chunk == 0 else 2 * stages - 1 - rank
            ends = index in (0, stages * virtual_stages - 1)
            more = held_by_chunk(job_spec, rank * tensor, chunk, run) - chunk_bytes(job_spec, index, True)
            assert 0 <= more <= (16 * 32 if ends else 0)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize(
    "frozen",
    [
        ["embedding", "layers.0-2"],
        ["embedding", "layers.0-1", "*.qkv", "layers.4.mlp.down"],
        ["*.mlp", "*.output", "output"],
        ["embedding", "layers", "final_norm"],
        ["embedding", "layers"],
    ],
    ids=str,
)
def test_frozen_weights_keep_no_activations_for_their_gradients(frozen, attention):
    job_spec = spec(
        model={"layers": 5, "tie_embeddings": False, "vocabulary_size": 301},
        train={"micro_batch_size": 2, "frozen": frozen, "attention": attention},
    )
    more = held_by_chunk(job_spec, 0, 0, ForwardPass(Positions.of(job_spec.model.sequence_length))) - chunk_bytes(
        job_spec, 0, False
    )
    assert 0 <= more <= 16 * 32
