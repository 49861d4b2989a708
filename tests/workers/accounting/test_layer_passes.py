"""What a layer's passes are told to take and free comes out even."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
from engine_specs import spec

from manta.workers.accounting.activation_bytes import deferred_bytes, layer_terms
from manta.workers.accounting.layer_passes import LayerPasses
from manta.workers.accounting.rank_passes import Pass, Tape
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec, LoraConfig
from manta.workers.parallel import recompute as recomputation

LATENT = {"kv_rank": 24, "rope_size": 8, "nope_size": 12, "value_size": 16}
FAMILIES: tuple[dict[str, Any], ...] = (
    {"family": "gpt"},
    {"family": "llama", "kv_heads": 2},
    {"family": "qwen", "kv_heads": 2, "head_dim": 16},
    {"family": "deepseek", "latent_attention": LATENT},
    {"family": "deepseek", "latent_attention": LATENT | {"q_rank": 28, "value_size": 24}},
)
MODULES = ((), ("norm", "mlp_activation", "core_attention"))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"pipeline": 3, "schedule": "zb-h1"},
    {"pipeline": 3, "schedule": "zb-h1", "tensor": 2},
)


def jobs() -> list[JobSpec]:
    """Families, layouts, precisions, with and without dropout, documents together and apart."""
    shape = {"layers": 3, "hidden_size": 64, "heads": 4, "sequence_length": 32}
    some = [
        spec(
            model=shape | family | {"dropout": dropout},
            train={"precision": precision, "global_batch_size": 8, "micro_batch_size": 2},
            parallel=layout,
        )
        for family, layout, precision, dropout in product(FAMILIES, LAYOUTS, ("fp32", "bf16"), (0.0, 0.1))
    ]
    some += [
        job.model_copy(update={"train": job.train.model_copy(update={"lora": LoraConfig(rank=4, dropout=dropout)})})
        for job, dropout in zip(some, cycle((0.0, 0.3)), strict=False)
    ]
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 32, "shared": 1, "shared_gate": True}
    some += [
        spec(
            model=shape | {"family": "llama", "moe": moe | {"shared": shared, "shared_gate": shared > 0}},
            train={"precision": "bf16", "global_batch_size": 8, "micro_batch_size": 2},
            parallel=layout | spread,
        )
        for layout, shared, spread in product(
            LAYOUTS, (0, 1), ({}, {"data": 4, "expert": 2}, {"data": 4, "expert": 4, "expert_dispatch": "all_to_all"})
        )
    ]
    apart = [job.model_copy(update={"data": job.data.model_copy(update={"documents": "apart"})}) for job in some]
    return some + apart


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("gpu", [True, False])
def test_backward_frees_what_forward_left_except_deferred_parts(modules, gpu):
    for job in jobs():
        layer = LayerPasses(job, 0, modules, gpu)
        deferred = -sum(each.net for each in layer.deferred()) if layer.split else 0
        assert layer.forward().net == layer.saved
        assert layer.forward(keeps=False).net == layer.sizes.residual
        assert layer.backward().net == deferred - layer.saved
        assert not layer.split or deferred == deferred_bytes(job, 1), "the layer of the stage in the middle"
        assert gpu or layer.saved == sum(layer_terms(job, 0, modules).values())


def test_recomputed_layer_leaves_nothing_but_briefly_takes_all():
    for job in jobs():
        layer = LayerPasses(job, 0)
        again = layer.recomputed_forward()
        assert again.net == layer.backward().net + layer.saved - layer.sizes.residual
        assert again.peak >= layer.saved


@pytest.mark.parametrize("saves", [{}, {"offload_layers": 1}, {"offload_layers": 9}], ids=str)
@pytest.mark.parametrize("head_tokens", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
def test_simulated_step_ends_with_the_memory_it_began_with(monkeypatch, schedule, head_tokens, saves):
    monkeypatch.setattr(recomputation, "OFFLOADED_BYTES", 0)
    chunks = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    layout = {"pipeline": 2, "schedule": schedule, "virtual_stages": chunks, "tensor": 2}
    for recompute, family, frozen in product(
        ("none", "selective", "full"), FAMILIES, ((), ("embedding", "layers.0-4"))
    ):
        model = {"layers": 8, "hidden_size": 64, "heads": 4} | family
        train = {"global_batch_size": 4, "frozen": frozen, "head_tokens": head_tokens}
        job = spec(model=model, train=train, parallel=layout | {"recompute": recompute} | saves)
        for rank in range(2):
            passes = StepPeak(job)
            most, left = passes.walk(rank, 4)
            assert left == passes.tables
            assert most > left


def test_memory_tape_knows_its_peak():
    tape = Tape()
    tape.allocate(3, 4)
    tape.free(5)
    tape.allocate_briefly(4)
    tape.run(Pass(6, -1))
    assert tape.total() == Pass(8, 1)
    assert Pass(5, 2).then(Pass(4, -2)) == Pass(6, 0)
