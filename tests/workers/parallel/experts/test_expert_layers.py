"""Layers with experts on one rank: what may not depend on how a micro-batch is computed, or on which tokens an expert
gets."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from engine_specs import document, spec
from one_layer import OneLayer, held_tensors
from rank_programs import micro_batches

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.model.stage import compile_layers
from manta.workers.parallel import recompute
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.spec.reading import parse_job_spec

MOE: dict[str, Any] = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16, "shared": 1, "shared_gate": True}
MOE |= {"balance": {"weight": 0.1, "bias_rate": 0.01}}


def engine_of(parallel: dict[str, Any] | None = None, moe: dict[str, Any] | None = None, **train: Any) -> Engine:
    """A small model on one rank."""
    shape = {"layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "sequence_length": 16, "vocabulary_size": 256}
    numbers: dict[str, Any] = {"micro_batch_size": 2, "optimizer": {"beta1": 0.0}} | train
    model = {"family": "qwen", "moe": MOE | (moe or {}), **shape}
    job = parse_job_spec(document(model=model, train=numbers, parallel=parallel or {}))
    engine = Engine(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")))
    engine.initialise(1)
    return engine


def step(engine: Engine, number: int = 1) -> StepStatistics:
    """One step."""
    windows = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(number))
    return engine.step(micro_batches(engine.spec, 0, windows, number), 8, 1e-3, 0)


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Those of the last step, by name."""
    moments = engine.optimizer.moments["exp_avg"]
    return {slot.entry.name: moments[slot.start : slot.end].clone() for slot in engine.flat.slots}


WAYS: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "selective", "recompute_modules": ["core_attention", "norm", "mlp_activation"]},
    {"offload_layers": 2, "recompute": "full", "recompute_every": 2},
]


@pytest.mark.parametrize("parallel", WAYS)
def test_recomputed_and_offloaded_experts_give_the_same_bits(parallel):
    with mock.patch.object(recompute, "OFFLOADED_BYTES", 0):
        usual, other = (engine_of(each) for each in ({}, parallel))
        for number in (1, 2):
            numbers = [
                (each.loss, each.balance_loss, each.expert_tokens) for each in map(step, (usual, other), (number,) * 2)
            ]
            assert numbers[0] == numbers[1], "losses and tokens count once"
            first, second = gradients(usual), gradients(other)
            assert all(torch.equal(first[name], second[name]) for name in first)


def test_compiled_layers_leave_experts_out_and_give_the_same_numbers():
    usual, compiled = engine_of(), engine_of()
    compile_layers(compiled.model, backend="aot_eager")
    for number in (1, 2):
        first, second = step(usual, number), step(compiled, number)
        assert (first.loss, first.grad_norm) == pytest.approx((second.loss, second.grad_norm), rel=1e-5)
        assert first.expert_tokens == second.expert_tokens


@pytest.mark.parametrize("frozen", ["*.experts.*", "*.experts.2.*", "*.router", "*.shared.*", "*.mlp.*"])
def test_frozen_matrices_change_no_gradient_of_others(frozen):
    whole, part = engine_of(), engine_of(frozen=[frozen])
    step(whole), step(part)
    expected, computed = gradients(whole), gradients(part)
    assert 0 < len(computed) < len(expected)
    scale = torch.cat(list(expected.values())).norm() / torch.cat(list(computed.values())).norm()
    assert scale >= 1.0
    for name, gradient in computed.items():  # each clipped by the norm of all that is trained
        ratio = gradient.norm() / expected[name].norm()
        assert torch.allclose(gradient, expected[name] * ratio, rtol=1e-4, atol=1e-7), name


def test_an_expert_without_tokens_has_no_gradient_and_is_updated():
    engine = engine_of()
    assert engine.model.router_biases is not None
    engine.model.router_biases[:, 1] = -100.0
    before, added = engine.flat.parameters.clone(), []
    engine.pipeline._when_added = added.append
    statistics = step(engine)
    assert all(tokens[1] == 0 and sum(tokens) == 2 * 8 * 16 for tokens in statistics.expert_tokens or ())
    idle = [slot for slot in engine.flat.slots if ".experts.1." in slot.entry.name]
    for slot in idle:
        where = slice(slot.start, slot.end)
        assert not gradients(engine)[slot.entry.name].any()
        assert sum(each is slot.entry.parameter for each in added) == 4, "once for each micro-batch"
        assert not torch.equal(engine.flat.parameters[where], before[where]), "its weights decay"


def test_the_bias_moves_towards_the_mean_with_steps_that_update():
    engine = engine_of()
    biases = engine.model.router_biases
    assert biases is not None
    tokens = torch.tensor(step(engine).expert_tokens)
    assert torch.equal(biases, 0.01 * torch.sign(64.0 - tokens))
    before = biases.clone()
    engine.optimizer.limits = (0.0, 0.0)
    assert not step(engine, 2).updated
    assert torch.equal(biases, before)


def test_a_step_repeated_for_overflow_counts_and_moves_once():
    engine = engine_of(precision="fp16")
    engine.loss_scale.state[0] = 2.0**40
    statistics, biases = step(engine), engine.model.router_biases
    assert engine.loss_scale.value < 2.0**40 and biases is not None
    tokens = torch.tensor(statistics.expert_tokens)
    assert torch.equal(tokens.sum(1), torch.tensor([2 * 8 * 16] * 2))
    assert torch.equal(biases, 0.01 * torch.sign(64.0 - tokens))


def test_evaluation_counts_nothing_and_has_no_balance_loss():
    with_loss, without = engine_of(), engine_of(moe={"balance": {"loss": "none"}})
    windows = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(5))
    losses = [each.pipeline.evaluate(micro_batches(each.spec, 0, windows))[0] for each in (with_loss, without)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("favourite", [0, 3])
def test_a_layer_keeps_equally_many_tensors_whatever_its_tokens_choose(favourite):
    job = spec(model={"family": "qwen", "hidden_size": 32, "heads": 4, "moe": MOE}, train={"micro_batch_size": 2})
    counts = []
    for bias in (None, favourite):
        layer = OneLayer(job)
        if bias is not None:
            layer.layer.mlp.bias_e = 100.0 * torch.nn.functional.one_hot(torch.tensor(bias), 4)
        source = layer.input().requires_grad_()
        layer.forward(source * 1.0)
        counts.append(len(held_tensors(lambda layer=layer, source=source: layer.forward(source * 1.0))[0]))
    assert counts[0] == counts[1]
