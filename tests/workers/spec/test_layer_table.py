"""The table of a layer says what the layers of workers/model do: which weights they have, which products they compute,
and which tensors they save for backward."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from dispatch_mode import DispatchMode
from engine_specs import spec
from job_cover import Factors, Row, cover
from one_layer import OneLayer, held_tensors

from manta.workers.accounting.activation_bytes import layer_terms, tokens_of
from manta.workers.config import JobSpec
from manta.workers.data.batches import Documents
from manta.workers.parallel.experts.layer import ExpertMLP
from manta.workers.parallel.tensor.shards import named_shards
from manta.workers.spec.layer_table import LayerTable, layer_table, layer_table_of
from manta.workers.spec.parameters import layer_kinds
from manta.workers.spec.problems import SpecError

MODULES = ("core_attention", "norm", "mlp_activation")
FACTORS: Factors = {
    "family": (
        *(("gpt", True), ("gpt", False), ("llama", True), ("llama", False), ("qwen", False)),
        *(("deepseek", False), ("deepseek, short queries", False)),
    ),
    "heads": ((8, None), (8, 10), (2, None), (2, 10), (1, 10)),
    "layout": ((1, False), (2, False), (2, True), (4, True)),
    "attention": (("explicit", 0.1), ("explicit", 0.0), ("sdpa", 0.0)),
    "modules": ((), *((each,) for each in MODULES), MODULES[1:], MODULES),
    "documents": ("together", "apart"),
    "window": (None, 5),
    "frozen": ((), ("*.mlp",), ("*.q", "*.up"), ("*.qkv", "*.kv", "*.down"), ("*.attention.*", "*.gate")),
    "experts": (None, (4, 2, 0, False), (6, 1, 2, True), (4, 3, 1, False)),
    "lora": (None, (3, 0.3, None), (5, 0.0, ("k", "v", "down")), (2, 0.0, ("q", "up"))),
}
"""Family and biases; key-value heads and size of a head; tensor ranks and sequence parallelism; written out or fused,
and dropout; recomputed modules; experts, those of a token, shared ones and their gate; rank, dropout and targets of
adapters."""


LATENT = {
    "deepseek": {"kv_rank": 22, "rope_size": 4, "nope_size": 8, "value_size": 7},
    "deepseek, short queries": {"kv_rank": 22, "q_rank": 30, "rope_size": 4, "nope_size": 5, "value_size": 11},
}


def job_of(row: Row) -> JobSpec:
    """A small job whose sizes are all different. Raises SpecError for a row that no job has."""
    (family, bias), (groups, size), (tensor, split) = row["family"], row["heads"], row["layout"]
    attention, dropout = row["attention"]
    model = {"family": family, "bias": bias, "kv_heads": groups, "head_dim": size, "dropout": dropout, "heads": 8}
    if family in LATENT:
        model = {"family": "deepseek", "latent_attention": LATENT[family], "dropout": dropout, "heads": 8}
    model |= {"hidden_size": 48, "sequence_length": 20, "ffn_hidden_size": 80, "sliding_window": row["window"]}
    layout: dict[str, Any] = {"tensor": tensor, "sequence_parallel": split}
    if row["experts"]:
        numbers = zip(("experts", "per_token", "shared", "shared_gate"), row["experts"], strict=True)
        model |= {"moe": {**dict(numbers), "ffn_hidden_size": 8, "normalise": row["experts"][1] > 1}}
    if row["modules"]:
        layout |= {"recompute": "selective", "recompute_modules": row["modules"]}
    if row["lora"] and row["frozen"]:
        raise SpecError([])
    lora = row["lora"] and dict(zip(("rank", "dropout", "targets"), row["lora"], strict=True))
    train = {"micro_batch_size": 3, "attention": attention, "lora": lora}
    job = spec(model=model, train=train, parallel=layout)
    documents = job.data.model_copy(update={"documents": row["documents"]})
    train = job.train.model_copy(update={"frozen": row["frozen"]})
    return job.model_copy(update={"data": documents, "train": train})


FUSED: Row = {
    "layout": (1, False),
    "attention": ("sdpa", 0.0),
    "frozen": ("*.output",),
    "window": None,
    "heads": (2, None),
}
FUSED |= {"lora": None, "experts": None}
ROWS = [row for row, _ in cover(FACTORS, job_of)] + [
    {"family": (family, False), "modules": modules, "documents": documents, **FUSED}
    for family, modules, documents in product(("gpt", "qwen"), ((), ("core_attention",)), ("together", "apart"))
]


class _Products(DispatchMode):
    """Counts products with matrices by their three lengths. Batches of products are those of attention if it is written
    out, otherwise parts of one product."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.lengths: Counter[tuple[int, ...]] = Counter()
        self.names = ("mm", "addmm", "addmm_") if written_out else ("mm", "addmm", "addmm_", "bmm")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.names:
            left, right = args[1:3] if name.startswith("addmm") else args[:2]
            rows, inner = left.flatten(0, -2).shape
            self.lengths[tuple(sorted((rows, inner, right.shape[-1])))] += 1
        return func(*args, **(kwargs or {}))


def shapes(table: LayerTable) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters on a rank, by name."""
    weights = {f"{w.name}.weight": (w.rows,) if w.is_vector else (w.rows, w.columns) for w in table.weights}
    adapters = {name: shape for w in table.weights for name, shape in w.adapter_shapes.items()}
    return weights | adapters | {f"{w.name}.bias": (w.rows,) for w in table.weights if w.has_bias}


@pytest.mark.parametrize("job", [pytest.param(job_of(row), id=repr(row)) for row in ROWS])
def test_weights_products_and_saved_tensors_of_a_layer_match_its_table(job):
    layer, table, frozen = OneLayer(job), layer_table_of(job), layer_kinds(job)[0].frozen
    shards = {entry.name: entry.parameter for entry in named_shards(layer.layer)}
    assert {name: tuple(parameter.shape) for name, parameter in shards.items()} == shapes(table)
    assert table.parameters == {name: parameter.numel() for name, parameter in shards.items()}
    for name, parameter in shards.items():
        parameter.requires_grad_(name not in frozen)
    for experts in (each for each in layer.layer.modules() if isinstance(each, ExpertMLP)):
        experts.know_frozen({f"layers.0.{name}" for name in frozen})
    documents = Documents(((0, 7, 8), (0,), (0, 13)), 20) if job.data.documents == "apart" else None
    source = layer.input().requires_grad_()
    layer.forward(source * 1.0, documents)  # makes the tables that all layers share
    with _Products(job.attention_is_explicit) as forward:
        saved, edge = held_tensors(lambda: layer.forward(source * 1.0, documents))
    modules = job.layout.recompute_modules if job.layout.recompute == "selective" else ()
    terms = layer_terms(job, 0, modules)
    assert sum(saved) == sum(terms.values())
    if documents is None:  # otherwise attention saves tensors of each document
        assert sorted(saved) == sorted(terms.values())
    with _Products(job.attention_is_explicit) as backward:
        torch.autograd.backward([edge], [torch.ones_like(source)])
    matrices = {name: shape for name, shape in shapes(table).items() if len(shape) == 2}
    whole = {f"{each.name}.weight" for products in table.products if products.whole for each in products.weights}
    lengths = {name: tuple(sorted((tokens_of(job)[name in whole], *shape))) for name, shape in matrices.items()}
    trained = [each for name, each in lengths.items() if name not in frozen]
    again = [each for name, each in lengths.items() if name.endswith("lora_a")]
    if table.experts is None:
        assert forward.lengths == Counter(lengths.values())
        assert backward.lengths == Counter([*lengths.values(), *trained, *again])
        return
    # How many rows each expert has depends on data, but not how many all have.
    part = {name: Fraction(table.experts.per_token, table.experts.experts) for name in table.of_experts}
    work = {name: prod(each) * part.get(name, 1) for name, each in lengths.items()}
    forwards, backwards = (
        sum(prod(each) * times for each, times in counted.lengths.items()) for counted in (forward, backward)
    )
    assert forwards == sum(work.values())
    of_trained = sum(each for name, each in work.items() if name not in frozen)
    of_again = sum(each for name, each in work.items() if name.endswith("lora_a"))
    assert backwards == forwards + of_trained + of_again


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("groups", [8, 4])
def test_logical_matrices_of_a_weight_have_each_of_its_rows_once(groups, tensor):
    job = spec(model={"family": "qwen", "hidden_size": 64, "heads": 8, "kv_heads": groups, "head_dim": 4})
    table = layer_table(job.model, tensor)
    for weight in table.weights:
        rows = [
            part.first + block * part.stride + row
            for part in weight.parts
            for block in range(part.blocks)
            for row in range(part.length)
        ]
        assert sorted(rows) == list(range(weight.rows))
    assert {"attention.q", "attention.k", "attention.v", "mlp.gate", "mlp_norm"} < table.logical_matrices.keys()
