"""What autograd really holds for a layer, and for a whole chunk, is what the arithmetic and the paper say."""

from __future__ import annotations

from functools import cache

import papers
import pytest
import torch
from engine_specs import spec
from one_layer import held_by_layer, held_bytes, lone_rank

from manta.workers.accounting.activation_bytes import chunk_bytes, layer_terms, saved_terms
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute import Recompute
from manta.workers.parallel.tensor.cross_entropy import vocabulary_parallel_cross_entropy
from manta.workers.parallel.tensor.dropout import sample_keys
from manta.workers.parallel.tensor.positions import Positions

TABLE_2 = {
    "no parallelism": (False, "none"),
    "tensor parallel (baseline)": (False, "none"),
    "tensor + sequence parallel": (True, "none"),
    "tensor parallel + selective recompute": (False, "selective"),
    "tensor + sequence parallel + selective recompute": (True, "selective"),
    "full activation recomputation": (False, "full"),
}
measured = cache(held_by_layer)


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


def paper_layer(tensor: int, sequence_parallel: bool, recompute: str) -> JobSpec:
    """The layer of the measurement: s = h = 512, 8 heads, bf16, attention written out, dropout."""
    return spec(
        model={"hidden_size": 512, "heads": 8, "sequence_length": 512, "dropout": 0.1},
        train={"precision": "bf16", "attention": "explicit"},
        parallel={"tensor": tensor, "sequence_parallel": sequence_parallel, "recompute": recompute},
    )


@pytest.mark.parametrize(
    ("row", "tensor"), [(row, t) for row in TABLE_2 for t in (1, 2, 4) if t == 1 or row != "no parallelism"]
)
def test_measured_activations_of_a_layer_match_table_2(row, tensor):
    """arXiv:2205.05198, table 2. Sequence parallelism needs t > 1; at t = 1 its rows are the baseline's."""
    sequence_parallel, recompute = TABLE_2[row]
    job = paper_layer(tensor, sequence_parallel and tensor > 1, recompute)
    formula = papers.LAYER_BYTES[row]
    expected = eval(formula, {}, {"s": 512, "b": 1, "h": 512, "a": 8, "t": tensor})
    assert measured(job) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tensor", [2, 4])
def test_full_recomputation_keeps_a_tensor_rank_share_of_the_input_under_sequence_parallelism(tensor):
    """2 s b h / t, where the table has 2 s b h: the layer's input is split already, and is gathered again anyhow."""
    assert measured(paper_layer(tensor, True, "full")) == 2 * 512 * 512 // tensor


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activation_bytes_in_bf16_differ_only_by_norm_statistics_on_a_cpu(sequence_parallel):
    """CPUs keep them in 16 bits too, GPUs in fp32, as the arithmetic has it."""
    job_spec = spec(
        model={"hidden_size": 48, "heads": 8, "sequence_length": 20, "dropout": 0.1},
        train={"micro_batch_size": 3, "attention": "explicit", "precision": "bf16"},
        parallel={"tensor": 2, "sequence_parallel": sequence_parallel},
    )
    outside = 3 * 20 // (2 if sequence_parallel else 1)
    assert held_by_layer(job_spec) == sum(layer_terms(job_spec).values()) - 4 * outside * 2


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


def test_fully_recomputed_layer_keeps_only_its_input():
    job_spec = spec(train={"micro_batch_size": 3}, parallel={"recompute": "full"})
    assert held_by_layer(job_spec) == sum(saved_terms(job_spec, 0, "full").values()) == 8 * 3 * 32 * 4
