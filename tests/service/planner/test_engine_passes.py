"""What the planner counts of element-wise kernels is what the engine does: operation by operation on a CPU, eager; and
compiled it is less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dispatch_mode import DispatchMode
from torch.utils._pytree import tree_leaves

from manta.service.planner import engine_passes
from manta.service.planner.engine_passes import EnginePasses, layer_time
from manta.service.planner.hardware import MACHINES, Cluster, Gpu, measured
from manta.service.planner.layer_time import LayerTime
from manta.service.planner.software import MANTA_ON_MEASURED_GPU, engine_on
from manta.service.planner.step_time import StepModel
from manta.workers.calibration.device import OneRank, document_of
from manta.workers.config import JobSpec
from tests.service.support.planned import job

ASSUMED = MACHINES["h100-80gb"]
GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
BYTES = Gpu(1e30, 1e30, 1e30, 1.0, 1.0, 1e-30, 1e-30, 1.0)
"""On which a byte takes a second, and nothing else takes any time."""
NO_TRAFFIC = {"view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "expand", "slice", "select", "unbind"}
NO_TRAFFIC |= {"split", "alias", "detach", "as_strided", "_reshape_alias", "empty_like", "lift_fresh"}
COUNTED_APART = {"mm", "addmm", "addmm_", "_scaled_dot_product_flash_attention_for_cpu", "copy_", "add_"}
COUNTED_APART |= {"_scaled_dot_product_flash_attention_for_cpu_backward", "_fused_adamw_", "_foreach_mul_"}
COUNTED_APART |= {"linalg_vector_norm", "cat"}
"""Products, attention, gradient reductions, the update."""
LATENT = {"q_rank": 96, "kv_rank": 64, "rope_size": 32, "nope_size": 64, "value_size": 64}
LAYERS, HIDDEN, TOKENS, MICRO_BATCHES = (1, 2), 256, 256, 8


class Traffic(DispatchMode):
    """Bytes that each operation reads and writes, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        written = [each for key, each in kwargs.items() if key == "grad_input"]
        given = (args, {key: each for key, each in kwargs.items() if key != "grad_input"})
        if name not in NO_TRAFFIC:
            self.moved[name] += _bytes(tree_leaves(given)) + _bytes(tree_leaves(written or result))
        return result


def _bytes(values: Sequence[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in values if isinstance(each, torch.Tensor))


def engine_bytes(family: str, layers: int, kv_heads: int | None) -> Counter[str]:
    rank = OneRank(document(family, layers, kv_heads), torch.device("cpu"))
    rank.step()
    with Traffic() as traffic:
        rank.step()
    return traffic.moved


def document(family: str, layers: int, kv_heads: int | None, compiled: bool = False) -> dict[str, Any]:
    more = {"latent_attention": LATENT} if family == "deepseek" else {}
    fields = document_of(
        (layers, HIDDEN, 4, 128, TOKENS // 128, MICRO_BATCHES, 512), "bf16", family=family, kv_heads=kv_heads, **more
    )
    fields["train"]["compile"] = compiled
    return fields


def passes(spec: JobSpec, gpu: Gpu = GPU) -> LayerTime:
    machine = measured(ASSUMED, gpu)
    return StepModel(spec, Cluster(machine, 1, 1), engine_on(machine)).layer


@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [
        ("gpt", None),
        pytest.param("llama", None, marks=pytest.mark.soak),
        ("llama", 2),
        pytest.param("qwen", 2, marks=pytest.mark.soak),
        ("deepseek", None),
    ],
)
def test_planned_bytes_of_a_layer_match_the_engines_operations(monkeypatch, family, kv_heads):
    for name, value in {"WIDENED": 1, "REDUCED": 1, "SPREAD": 1, "MIXED": 6}.items():
        monkeypatch.setattr(engine_passes, name, value)  # what is moved, however fast
    few, many = (engine_bytes(family, layers, kv_heads) for layers in LAYERS)
    of_layer = {name: (many[name] - few[name]) / (LAYERS[1] - LAYERS[0]) / MICRO_BATCHES for name in many}
    made = sum(moved for name, moved in of_layer.items() if name not in COUNTED_APART)
    # A kernel of its own reads the same again for the gradients of the norm's weights.
    made += of_layer.get("native_layer_norm_backward", 0.0) * 2 / 3
    layer = passes(JobSpec.model_validate(document(family, 2, kv_heads)), BYTES)
    planned = sum(each.elementwise for each in (layer.forward(), layer.backward_input(), layer.backward_weight()))
    assert planned == pytest.approx(made, rel=0.012)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_compiled_layers_move_less_than_half_the_bytes_of_eager_ones(family):
    eager, compiled = (passes(JobSpec.model_validate(document(family, 2, 2, each)), BYTES) for each in (False, True))
    for name in ("forward", "backward_input"):
        assert getattr(compiled, name)().elementwise < 0.5 * getattr(eager, name)().elementwise
    assert compiled.output_forward().elementwise < 0.4 * eager.output_forward().elementwise


def test_compiled_optimizer_update_moves_34_of_46_bytes():
    machine = measured(ASSUMED, BYTES)
    eager, compiled = (
        StepModel(job(train={"compile": each}), Cluster(machine, 1, 1), engine_on(machine)) for each in (False, True)
    )
    assert compiled.optimizer_seconds() == pytest.approx(34 / 46 * eager.optimizer_seconds())


def test_planned_optimizer_update_waits_for_a_slow_host():
    def update(size: int, host: float) -> float:
        machine = measured(ASSUMED, Gpu(**{**vars(GPU), "host_seconds": host}))
        spec = job(train={"micro_batch_size": size, "global_batch_size": size})
        return StepModel(spec, Cluster(machine, 1, 1), engine_on(machine)).optimizer_seconds()

    assert update(64, 7e-6) == pytest.approx(update(64, 1e-9))
    assert update(1, 3e-5) - update(1, 2e-5) == pytest.approx(1e-5 * MANTA_ON_MEASURED_GPU.update_operations)


def test_exact_engine_passes_are_used_for_measured_gpus_only():
    spec, machine = job(), measured(ASSUMED, GPU)
    assert isinstance(passes(spec), EnginePasses)
    assert type(StepModel(spec, Cluster(ASSUMED, 1, 8), engine_on(ASSUMED)).layer) is LayerTime
    assert type(layer_time(spec, passes(spec).groups, engine_on(ASSUMED))) is LayerTime
    assert engine_on(machine).counts_kernels and not engine_on(ASSUMED).counts_kernels


def test_full_recomputation_costs_a_forward_and_selective_a_fraction_of_it():
    plain, selective, full = (passes(job(recompute=each)).backward_input() for each in ("none", "selective", "full"))
    forward = passes(job()).forward()
    assert full.seconds - plain.seconds == pytest.approx(forward.seconds)
    assert 0 < selective.recomputation < 0.2 * full.recomputation
    assert full.operations - plain.operations == forward.operations + engine_passes.UNDER_HOOKS


def test_fp32_accumulation_costs_a_pass_unless_products_do_it():
    spec = job(train={"micro_batch_size": 16})
    apart, within = (passes(spec, Gpu(**{**vars(GPU), "adds_wider": each})).backward_weight() for each in (False, True))
    assert 0 < within.accumulation < 0.4 * apart.accumulation
    alone = passes(job(train={"micro_batch_size": 64})).backward_weight()
    assert alone.accumulation == 0, "a step's first gradients take the place of what was there"


@pytest.mark.parametrize("family", ["gpt", "llama", "qwen"])
@pytest.mark.parametrize("compiled", [False, True])
def test_small_micro_batches_are_bound_by_the_host_and_large_ones_are_not(family, compiled):
    def step(size: int, micro_batches: int, host: float) -> float:
        spec = job(
            model={"family": family, "kv_heads": 16, "sequence_length": 1024},
            train={"micro_batch_size": size, "global_batch_size": size * micro_batches, "compile": compiled},
        )
        machine = measured(ASSUMED, Gpu(**{**vars(GPU), "host_seconds": host}))
        return StepModel(spec, Cluster(machine, 1, 1), engine_on(machine)).time().seconds

    assert step(16, 4, 7e-6) == pytest.approx(step(16, 4, 1e-9), rel=0.1)
    assert step(1, 4, 3e-5) == pytest.approx(2 * step(1, 4, 1.5e-5), rel=0.1)


def test_tensor_parallel_layers_of_measured_gpus_have_less_each_and_communicate():
    alone, split = passes(job()), passes(job(tensor=4))
    assert split.forward().products < alone.forward().products
    assert split.forward().tensor > 0 == alone.forward().tensor


def test_offloaded_activations_take_the_measured_copy_rate():
    spec = job(offload_layers=8, train={"micro_batch_size": 32})
    fast, slow = (passes(spec, Gpu(**{**vars(GPU), "copy": each})).passes() for each in (1e13, 1e9))
    assert fast.forward.copies == 0 < slow.forward.copies


def test_planned_chunked_head_computes_its_forward_in_the_backward():
    whole, parts = (passes(job(train={"micro_batch_size": 16, "head_tokens": each})) for each in (0, 1024))
    assert parts.output_forward().products == 0 < whole.output_forward().products
    both = [each.output_forward().products + each.output_backward().products for each in (whole, parts)]
    assert both[0] == pytest.approx(both[1])
    assert parts.output_backward().accumulation > 5 * whole.output_backward().accumulation


def test_planned_fp8_products_are_faster_but_need_casts():
    plain, narrow = (passes(job(hidden=4096, heads=32, train={"fp8": each})) for each in ("off", "tensorwise"))
    assert narrow.forward().products < 0.7 * plain.forward().products
    assert narrow.forward().elementwise > plain.forward().elementwise
