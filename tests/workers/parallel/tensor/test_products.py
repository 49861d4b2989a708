"""Other kernels take the place of torch's by one argument of the engine, and torch's accumulate as they are told."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from dispatch_mode import DispatchMode, FakeMode
from engine_specs import layout_of, spec
from rank_programs import micro_batches

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.parallel.tensor import products as products_module
from manta.workers.parallel.tensor.products import TorchProducts


class Counted(TorchProducts):
    """torch's products, counted."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __getattribute__(self, name):
        attribute = super().__getattribute__(name)
        if name in ("output", "output_added", "input_gradient", "add_weight_gradient", "add_bias_gradient", "gelu"):
            self.calls[name] += 1
        return attribute


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_engine_computes_all_linear_layers_with_the_given_products(kv_heads):
    job = spec(model={"layers": 3, "kv_heads": kv_heads})
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(1))
    counted, losses = Counted(), []
    for products in (None, counted):
        engine = Engine(job, Comm(RankGrid(layout_of()), 0, torch.device("cpu")), products=products)
        engine.initialise(1)
        losses.append(engine.step(micro_batches(job, 0, windows), 8, 1e-3, 0))
    assert losses[0].loss == losses[1].loss
    assert losses[0].grad_norm == losses[1].grad_norm
    weights = 3 * (4 if kv_heads == 4 else 5) + 1  # a layer's, and the logits
    assert counted.calls["add_weight_gradient"] == 8 * weights
    assert counted.calls["add_bias_gradient"] == 8 * (weights - 1)
    assert counted.calls["output_added"] == 8 * 3 * 2
    assert counted.calls["gelu"] == 8 * 3
    assert counted.calls["input_gradient"] == 8 * (3 * 4 + 1), "queries, keys and values have one input"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [True, False])
def test_products_add_or_replace_gradients_as_told(keep, dtype):
    generator = torch.Generator().manual_seed(2)
    grads, inputs = (torch.randn(6, width, generator=generator).to(dtype) for width in (3, 5))
    before, products = torch.randn(3, 5, generator=generator), TorchProducts()
    weight, bias = before.clone(), before[:, 0].clone()
    products.add_weight_gradient(weight, grads, inputs, keep)
    products.add_bias_gradient(bias, grads, keep)
    old = before if keep else torch.zeros_like(before)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-7}
    torch.testing.assert_close(weight, old + grads.float().t() @ inputs.float(), **tolerance)
    torch.testing.assert_close(bias, old[:, 0] + grads.float().sum(0), **tolerance)


class Asked(DispatchMode):
    """What is asked of torch; a product that is added on a GPU is only written down."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs or {}))
        if function in (torch.ops.aten.addmm.dtype_out, torch.ops.aten.mm.dtype_out):
            return kwargs["out"]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
def test_bf16_weight_gradient_product_accumulates_into_fp32_in_one_gpu_kernel(keep):
    with FakeMode(), Asked() as asked:
        total = torch.empty(3, 5, device="cuda")
        grads, inputs = (torch.empty(6, width, device="cuda", dtype=torch.bfloat16) for width in (3, 5))
        asked.calls.clear()
        TorchProducts().add_weight_gradient(total, grads, inputs, keep)
    *before, (function, (added_to, left, right, dtype), options) = asked.calls
    assert {each.name() for each, *_ in before} <= {"aten::t", "aten::detach", "prim::device"}, "no other kernel"
    assert function is torch.ops.aten.addmm.dtype_out
    assert added_to is options["out"] is total
    assert (left.shape, right.shape, dtype) == ((3, 6), (6, 5), torch.float32)
    assert options.get("beta", 1) == int(keep)


def test_first_bf16_weight_gradient_on_an_older_torch_is_written_as_fp32_directly(monkeypatch):
    monkeypatch.setattr(products_module, "ADDS_WIDER", False)
    with FakeMode(), Asked() as asked:
        total = torch.empty(3, 5, device="cuda")
        grads, inputs = (torch.empty(6, width, device="cuda", dtype=torch.bfloat16) for width in (3, 5))
        asked.calls.clear()
        TorchProducts().add_weight_gradient(total, grads, inputs, keep=False)
    *before, (function, (left, right, dtype), options) = asked.calls
    assert {each.name() for each, *_ in before} <= {"aten::t", "aten::detach", "prim::device"}, "no other kernel"
    assert function is torch.ops.aten.mm.dtype_out and options["out"] is total
    assert (left.shape, right.shape, dtype) == ((3, 6), (6, 5), torch.float32)


def test_products_add_a_residual_without_changing_it():
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, residual = (
        torch.randn(*size, generator=generator) for size in ((2, 4, 5), (3, 5), (3,), (2, 4, 3))
    )
    before = residual.clone()
    for b in (bias, None):
        expected = F.linear(x, weight, b) + residual
        torch.testing.assert_close(TorchProducts().output_added(x, weight, b, residual), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(residual, before)


@pytest.mark.parametrize(("kind", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_the_gradient_of_gelu_is_autograds(kind, approximate):
    x = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    F.gelu(x, approximate=approximate).backward(torch.ones_like(x))
    gradient = TorchProducts().gelu_gradient(torch.ones(20, dtype=torch.float64), x.detach(), kind)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-12)
