"""8-bit products beside fp32 ones of matrices that are rounded here, by arithmetic of their own; which weights they
compute, and how often those are cast; what does not fit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from engine_specs import layout_of, spec
from rank_programs import micro_batches
from torch import nn

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.errors import ModelError
from manta.workers.parallel.tensor import fp8
from manta.workers.parallel.tensor.fp8 import BY_TENSOR, Casts, Fp8Products, refuse_without_kernels

CPU = torch.device("cpu")
KINDS = ("tensorwise", "rowwise")
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits of the mantissa, least exponent of a number with all of them, largest number."""
BF16 = {"rtol": 2.0**-7, "atol": 1e-2}
MODEL = {"layers": 2, "hidden_size": 32, "heads": 2, "sequence_length": 16}


def rounded(x: torch.Tensor, form: tuple[int, int, float], kind: str) -> torch.Tensor:
    """fp32 numbers as the format has them, with a scale for the matrix or for each row."""
    bits, least, largest = form
    x = x.double()
    most = x.abs().max() if kind == "tensorwise" else x.abs().amax(dim=1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(largest / most)))
    exponents = torch.frexp(x * scale).exponent - 1
    steps = torch.exp2(exponents.clamp(min=least).double() - bits)
    return (torch.round(x * scale / steps) * steps / scale).float()


def layer(outputs: int, inputs: int, seed: int) -> nn.Parameter:
    """A weight with memory for its gradient, as an engine's are."""
    weight = nn.Parameter(matrix(outputs, inputs, seed=seed))
    weight.main_grad = torch.full((outputs, inputs), 3.0)
    return weight


def matrix(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-3, 4, shape[:-1], generator=generator).float()).unsqueeze(-1)
    return (torch.randn(*shape, generator=generator) * spread).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_products_match_those_of_rounded_matrices(kind):
    products, gradients = Fp8Products(kind, CPU), E5M2 if kind == "tensorwise" else E4M3
    first, second = layer(48, 32, 1), layer(16, 32, 2)
    for weight in (first, second):
        products.take("it", weight)
    bias, x, residual = matrix(48, seed=3), matrix(4, 16, 32, seed=4), matrix(4, 16, 48, seed=5)
    x_ni = x.view(64, 32)
    outputs = products.outputs(x, (first, second), (bias, None))
    for y, weight, added in zip(outputs, (first, second), (bias.float(), 0.0), strict=True):
        expected = rounded(x_ni, E4M3, kind) @ rounded(weight.data, E4M3, kind).t() + added
        torch.testing.assert_close(y.view(64, -1).float(), expected, **BF16)
    torch.testing.assert_close(products.output(x, second), outputs[1], rtol=0, atol=0)
    y = products.output_added(x, first, bias, residual)
    torch.testing.assert_close(y, outputs[0] + residual, rtol=0, atol=0)

    grads = [matrix(64, 48, seed=6), matrix(64, 16, seed=7)]
    single = []
    for grad, weight in zip(grads, (first, second), strict=True):
        single.append(products.input_gradient([grad], [weight]))
        expected = rounded(grad, gradients, kind) @ rounded(weight.data.t(), E4M3, kind).t()
        torch.testing.assert_close(single[-1].float(), expected, **BF16)
    both = products.input_gradient(grads, (first, second))
    torch.testing.assert_close(both, single[0] + single[1], rtol=0, atol=0)

    products.add_weight_gradients([first.main_grad, second.main_grad], grads, x_ni, [True, False])
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if kind == "tensorwise" else BF16
    for weight, grad, before in zip((first, second), grads, (3.0, 0.0), strict=True):
        expected = rounded(grad.t(), gradients, kind) @ rounded(x_ni.t(), E4M3, kind).t() + before
        torch.testing.assert_close(weight.main_grad, expected, **tolerance)
    once = second.main_grad.clone()
    products.add_weight_gradient(second.main_grad, grads[1], x_ni, keep=True)  # as if it had been put off
    torch.testing.assert_close(second.main_grad, 2 * once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_excluded_from_fp8_are_multiplied_as_by_torch(kind):
    products, weight, x = Fp8Products(kind, CPU), layer(48, 32, 1), matrix(16, 32, seed=2)
    grads, total = matrix(16, 48, seed=3), weight.main_grad
    assert torch.equal(products.output(x, weight), F.linear(x, weight))
    assert torch.equal(products.output_added(x, weight, None, grads), torch.addmm(grads, x, weight.t()))
    assert torch.equal(products.input_gradient([grads], [weight]), grads @ weight)
    products.add_weight_gradient(total, grads, x, keep=False)
    assert torch.equal(total, (grads.t() @ x).float())


def job(kind: str = "tensorwise", family: str = "llama", **train: object) -> JobSpec:
    """Two layers; of a step's eight samples two micro-batches."""
    numbers = {"precision": "bf16", "fp8": kind, "micro_batch_size": 4}
    return spec(model=MODEL | {"family": family, "kv_heads": 1}, train=numbers | train)


def engine_of(job_spec: JobSpec) -> Engine:
    engine = Engine(job_spec, Comm(RankGrid(layout_of()), 0, CPU))
    engine.initialise(1)
    return engine


def step(engine: Engine, number: int = 0) -> tuple[float, float]:
    """Loss and gradient norm."""
    windows = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(number))
    statistics = engine.step(micro_batches(engine.spec, 0, windows), 8, 1e-2, 0)
    return statistics.loss, statistics.grad_norm


def test_a_step_casts_each_weight_once_and_each_input_and_gradient_once(monkeypatch):
    calls: Counter[str] = Counter()

    def counted(name, cast):
        return lambda x, dtype: calls.update([name]) or cast(x, dtype)

    monkeypatch.setattr(fp8, "BY_TENSOR", Casts(*(counted(*each) for each in BY_TENSOR._asdict().items())))
    engine = engine_of(job())
    step(engine)
    calls.clear()
    step(engine)
    # In a layer of Llama queries and keys have one input, gate and up have one; context and gated product are others.
    assert calls == {"rows": 2 * 2 * 4, "columns": 2 * 2 * 4, "pair": 2 * 6 + 2 * 2 * 6}


def test_gradients_whose_products_for_weights_are_put_off_are_not_kept_in_8_bits():
    """Schedules may put off those of many micro-batches."""
    products, weight = Fp8Products("tensorwise", CPU), layer(16, 32, 1)
    products.take("weight", weight)
    for seed in range(3):
        products.input_gradient([matrix(16, 16, seed=seed)], [weight])
    assert len(products._gradients) == 1, "those of the last product may be asked for at once"


def test_fp8_weight_casts_follow_updates_and_loads():
    """After a step, and after others were loaded, whoever has done that."""
    engine = engine_of(job())
    first = step(engine, 1)
    second = step(engine, 1)
    assert second[0] < first[0]
    engine.initialise(1)
    engine.optimizer.set_step(0)
    assert (step(engine, 1), step(engine, 1)) == (first, second)


def test_fp8_products_exclude_embedding_and_output_layer():
    engine = engine_of(job())
    taken = {name for name, weight in engine.model.named_parameters() if weight.data_ptr() in engine_products(engine)}
    assert taken == {
        name
        for name, weight in engine.model.named_parameters()
        if weight.dim() == 2 and ".layers." in name and "norm" not in name
    }
    assert len(taken) == 2 * 6


def engine_products(engine: Engine) -> set[int]:
    """Addresses of weights in 8 bits."""
    return set(engine.model._products._weights)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_leaves_the_training_state_unchanged(kind):
    shapes = [[(each.shape, each.dtype) for each in engine_of(job(fp8)).state()] for fp8 in ("off", kind)]
    assert shapes[0] == shapes[1]


def test_a_gpu_without_8_bits_is_refused():
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        refuse_without_kernels(capability)
    with pytest.raises(ModelError, match=r"capability 8.9 or above .* this one has 8.0: set train.fp8: off"):
        refuse_without_kernels((8, 0))


def test_fp8_products_refuse_widths_that_do_not_fit():
    with pytest.raises(ModelError, match=r"layers.0.mlp.up.weight is \[24, 32\] .* multiples of 16"):
        Fp8Products("tensorwise", CPU).take("layers.0.mlp.up.weight", layer(24, 32, 1))
