"""Plans of jobs that train a part of the model: no products, sums or updates for what is frozen."""

from __future__ import annotations

import math

import pytest

from manta.service.planner.explain import explain
from manta.service.planner.hardware import MACHINES, Cluster, Core, cpu_machine, measured
from manta.service.planner.search import search
from manta.service.planner.software import MANTA_ON_CPU
from manta.service.planner.step_time import StepModel
from manta.workers.accounting.flops import core_attention_forward, step_flops
from manta.workers.config import JobSpec
from manta.workers.spec.parameters import first_trained_layer
from tests.service.planner.test_engine_passes import GPU
from tests.service.support.planned import a100s, job

COUNTER = Core(1.0, 1.0, 0.0, math.inf, 0.0, math.inf, 0.0, 1.0)
"""A core on which a FLOP takes a second, and nothing else takes any time."""
LOWER = ("embedding", "layers.0-4")
PARTS = [LOWER, ("*.mlp",), ("embedding", "layers.0-5", "*.attention"), ("output",), ("layers.0-7", "embedding")]
LLAMA = {"family": "llama", "kv_heads": 4, "tie_embeddings": False}
GPT = {"dropout": 0.0, "tie_embeddings": False}


def frozen(patterns: tuple[str, ...], model: dict | None = None, **layout) -> JobSpec:
    """A job of eight layers."""
    return job(model=GPT | (model or {}), train={"frozen": patterns, "global_batch_size": 16}, **layout)


def reached(spec: JobSpec) -> int:
    """Layers that have a backward."""
    return spec.model.layers - max(0, first_trained_layer(spec.model, spec.train.frozen))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("patterns", [(), *PARTS], ids=str)
@pytest.mark.parametrize(
    "layout", [{}, {"pipeline": 4}, {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2}], ids=str
)
def test_planned_products_of_frozen_jobs_match_their_flops(patterns, model, layout):
    """Torch's own count of the engine's steps is what these FLOPs are held against."""
    spec = frozen(patterns, model, **layout)
    model_of_step = StepModel(spec, Cluster(cpu_machine(8, 1, 1e12, COUNTER), 1, 8), MANTA_ON_CPU)
    stages = range(spec.layout.pipeline * spec.layout.virtual_stages)
    passes = [each for index in stages for each in model_of_step.budgets_of(index)]
    batch, core = spec.train.global_batch_size, core_attention_forward(spec.model)
    attention = batch * (spec.model.layers + 2 * reached(spec)) * core
    products = spec.micro_batches * sum(each.products for each in passes)
    assert products == pytest.approx(step_flops(spec).hardware_full - attention, rel=1e-9)
    # A fused backward makes the scores again, which FLOPs leave out.
    kernels = batch * (spec.model.layers + 2.5 * reached(spec)) * core
    assert spec.micro_batches * sum(each.attention for each in passes) == pytest.approx(kernels, rel=1e-9)


@pytest.mark.parametrize(
    "cluster", [a100s(), Cluster(measured(MACHINES["h100-80gb"], GPU), 1, 8)], ids=["a100", "h100"]
)
def test_frozen_parameters_are_neither_reduced_nor_updated(cluster):
    whole, part = (StepModel(frozen(each, data=8), cluster) for each in ((), LOWER))
    slow, quick = whole.time(), part.time()
    assert part.parameters < 0.5 * whole.parameters
    assert quick.optimizer < 0.7 * slow.optimizer
    assert quick.pipeline < 0.8 * slow.pipeline
    assert quick.work > 1.01 * slow.work / 3, "its forwards are all there"


def test_frozen_embedding_has_no_planned_backward():
    """The layers above it have one all the same."""
    trained, part = (StepModel(frozen(each, pipeline=2), a100s()) for each in (("output",), ("output", "embedding")))
    backward, without = (model.budgets_of(0)[1] for model in (trained, part))
    assert without.elementwise > 0.0 and part.passes.parts.first_backward.device_seconds > 0.0
    assert without.plus(part.passes.parts.first_backward).device_seconds == pytest.approx(backward.device_seconds)


def test_frozen_tied_embedding_is_not_summed_over_stages():
    tied = {"tie_embeddings": True}
    whole, part = (StepModel(frozen(each, tied, pipeline=4), a100s()) for each in ((), ("embedding",)))
    assert whole.tied_seconds() > 0.0 == part.tied_seconds()


def test_recompute_every_second_layer_skips_layers_without_a_backward():
    spec = frozen(LOWER, recompute="full", recompute_every=2)
    again = StepModel(spec, a100s()).layer.backward_input().recomputation
    every = StepModel(frozen(LOWER, recompute="full"), a100s()).layer.backward_input().recomputation
    assert again == pytest.approx(every / 3), "layer 6 of 5, 6 and 7"


def test_search_and_explanation_account_for_frozen_layers():
    plan = search(frozen(LOWER), a100s()).plans[0]
    assert plan.spec.layout.recompute == "none", "there is room for all"
    assert plan.time.seconds < 0.8 * search(frozen(()), a100s()).plans[0].time.seconds
    parts = explain(plan, a100s()).shares
    assert sum(each.seconds for each in parts) == pytest.approx(plan.time.seconds)
