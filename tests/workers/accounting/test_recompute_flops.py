"""What recomputation costs, counted by torch on layers of the papers' size that hold no data."""

from __future__ import annotations

from functools import cache

import papers
import pytest
import torch
from dispatch_mode import FakeMode
from engine_specs import spec
from one_layer import FlopCounter, OneLayer

from manta.workers.accounting.flops import StepFlops, core_attention_forward, forward_flops, step_flops
from manta.workers.config import JobSpec

MODELS = ("22B", "175B", "530B", "1T")
ALL_MODULES = ("core_attention", "norm", "mlp_activation")


def paper_layer(name: str, attention: str = "explicit", **policy) -> JobSpec:
    """One layer and one micro-batch of a model of table 3 of arXiv:2205.05198, whole (t = 1)."""
    row = papers.MODELS[name]
    model = {"layers": 1, "hidden_size": row["hidden"], "heads": row["heads"], "sequence_length": 2048}
    return spec(
        model=model,
        train={"precision": "bf16", "micro_batch_size": row["micro_batch"], "attention": attention},
        parallel=policy,
    )


@cache
def counted(job: JobSpec) -> tuple[int, int]:
    """FLOPs that torch counts in (forward, backward) of the layer."""
    with FakeMode():
        layer = OneLayer(job)
        x = layer.input().requires_grad_()
        with FlopCounter() as forward:
            y = layer.forward(x)
        with FlopCounter() as backward:
            y.backward(torch.empty_like(y))
    return forward.flops, backward.flops


def arithmetic(job: JobSpec) -> StepFlops:
    """The same by arithmetic: a step over one micro-batch, without the logits."""
    size, model = job.train.micro_batch_size, job.model
    flops, logits = step_flops(job, size), 3 * size * 2 * model.sequence_length * model.hidden_size * 256
    return StepFlops(**{name: value - logits for name, value in vars(flops).items()})


def sizes(job: JobSpec) -> tuple[int, int, int]:
    """B, s, h."""
    return job.train.micro_batch_size, job.model.sequence_length, job.model.hidden_size


@pytest.mark.parametrize("name", MODELS)
def test_model_flops_are_three_forwards(name):
    """24 B s h^2 + 4 B s^2 h forward (arXiv:2205.05198, appendix A), twice that backward."""
    job = paper_layer(name)
    B, s, h = sizes(job)
    forward = 24 * B * s * h**2 + 4 * B * s**2 * h
    assert counted(job) == (forward, 2 * forward)
    assert arithmetic(job).model_full == arithmetic(job).hardware_full == 3 * forward


@pytest.mark.parametrize("name", MODELS)
def test_full_recomputation_costs_a_whole_forward(name):
    """4/3 of the model FLOPs."""
    job = paper_layer(name, recompute="full")
    forward, backward = counted(job)
    assert 3 * (forward + backward) == 4 * arithmetic(job).model_full
    assert forward + backward == arithmetic(job).hardware_full


@pytest.mark.parametrize("modules", [ALL_MODULES[:1], ALL_MODULES], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_selective_recomputation_costs_one_product_of_core_attention(name, modules):
    """q k^T, 2 B s^2 h: at most the 4 B s^2 h of core attention's forward, whose other product nothing needs; norms
    and activations have no products. It leaves less than a tenth of what full recomputation adds."""
    job = paper_layer(name, recompute="selective", recompute_modules=modules)
    B, s, h = sizes(job)
    forward, backward = counted(job)
    added = forward + backward - sum(counted(paper_layer(name)))
    full = sum(counted(paper_layer(name, recompute="full"))) - sum(counted(paper_layer(name)))
    assert added == 2 * B * s**2 * h <= 4 * B * s**2 * h
    assert added <= 0.1 * full
    assert forward + backward == arithmetic(job).hardware_full


@pytest.mark.parametrize("name", MODELS)
def test_fused_attention_is_recomputed_as_a_whole(name):
    """4 B s^2 h, also less than a tenth. torch counts another product within the fused kernel's backward, which is
    there without recomputation too."""
    plain, selective = paper_layer(name, "sdpa"), paper_layer(name, "sdpa", recompute="selective")
    B, s, h = sizes(plain)
    inside, added = 2 * B * s**2 * h, 4 * B * s**2 * h
    assert sum(counted(plain)) == arithmetic(plain).hardware_full + inside
    assert sum(counted(selective)) == arithmetic(selective).hardware_full + inside
    assert sum(counted(selective)) - sum(counted(plain)) == added
    assert added <= 0.1 * (sum(counted(paper_layer(name, "sdpa", recompute="full"))) - sum(counted(plain)))


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_hardware_flops_charge_three_forwards(name):
    """72 B L s h^2 (1 + s/(3h)) against 1 + s/(6h) (arXiv:2205.05198, appendix A): 12 B s^2 h a layer."""
    job = paper_layer(name, recompute="selective")
    B, s, h = sizes(job)
    flops = arithmetic(job)
    assert flops.hardware_paper == pytest.approx(72 * B * s * h**2 * (1 + s / (3 * h)), rel=1e-12)
    assert flops.hardware_paper - flops.model_full == 3 * B * core_attention_forward(job.model)
    _, core = forward_flops(job)
    assert core == core_attention_forward(job.model)
    assert flops.model_causal == flops.model_full - 3 * B * core // 2
