"""Products of parallel layers, sequence parallelism, compiled operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dispatch_mode import DispatchMode, FakeMode
from engine_specs import layout_of, spec
from rank_programs import micro_batches

from manta.workers.comm.backend import DONE
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.model.stage import linear_layers
from manta.workers.parallel.tensor import compiled_operators as operators
from manta.workers.parallel.tensor import products as products_module
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.region import Region
from manta.workers.parallel.tensor.sequence_parallel import (
    first_position,
    gather,
    leave,
    sum_partial,
    sum_replicated_gradients,
)


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


class OfTwo(Comm):
    """Tensor rank 1 of two; the other one has the same numbers, ten times as large."""

    def start_all_reduce(self, axis, tensor, largest=False):
        assert axis == "tensor"
        tensor.mul_(11.0)
        return DONE

    def start_all_gather(self, axis, tensor, out=None):
        return torch.cat([10.0 * tensor, tensor]), DONE

    def start_reduce_scatter(self, axis, tensor, out=None):
        return 11.0 * tensor[len(tensor) // 2 :], DONE


def region(sequence_parallel: bool) -> Region:
    comm = OfTwo(RankGrid(layout_of(tensor=2)), 1, torch.device("cpu"))
    return Region(comm, sequence_parallel, TorchProducts())


X = torch.arange(1.0, 9.0).view(4, 1, 2)


def test_sequence_parallel_rank_holds_its_part_of_the_sequence():
    assert (region(True).sequence_split, region(False).sequence_split) == (2, 1)
    assert first_position(region(True), 4) == 4
    assert first_position(region(False), 8) == 0


def test_sequence_is_gathered_only_if_it_is_split():
    assert torch.equal(gather(X, region(True)), torch.cat([10 * X, X]))
    assert gather(X, region(False)) is X


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_leaving_a_tensor_region_sums_and_its_gradient_returns_to_all_ranks(sequence_parallel):
    x = X.clone().requires_grad_()
    left = leave(x, region(sequence_parallel))
    assert torch.equal(left, 11 * (X[2:] if sequence_parallel else X))
    assert torch.equal(x.detach(), X), "what is summed is a copy"
    left.backward(torch.ones_like(left))
    expected = (
        torch.cat([torch.full((2, 1, 2), 10.0), torch.ones(2, 1, 2)]) if sequence_parallel else torch.ones_like(X)
    )
    assert torch.equal(x.grad, expected)


def test_partial_results_are_summed_in_place_without_sequence_parallelism():
    x = X.clone()
    assert sum_partial(x, region(False)) is x
    assert torch.equal(x, 11 * X)


def test_replicated_gradients_are_summed_in_place():
    gradients = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
    sum_replicated_gradients(gradients, region(True).comm)
    assert [each.tolist() for each in gradients] == [[11.0] * 2, [22.0] * 3]
    sum_replicated_gradients([], region(True).comm)


Layers = dict[str, ColumnParallelLinear | RowParallelLinear]
TOKENS = (8, 2)


def column(layers: Layers, x: torch.Tensor, grads: dict[str, torch.Tensor]) -> None:
    operators.column_parallel_backward(grads["gate"], x, layers["gate"].weight, 1)


def pair(layers: Layers, x: torch.Tensor, grads: dict[str, torch.Tensor]) -> None:
    weights = (layers["gate"].weight, layers["up"].weight)
    operators.column_parallel_pair_backward(grads["gate"], grads["up"], x, *weights)


def row(layers: Layers, x: torch.Tensor, grads: dict[str, torch.Tensor]) -> None:
    operators.row_parallel_backward(grads["output"], x, layers["output"].weight, 1)


@pytest.mark.parametrize(("backward", "names"), [(column, ["gate"]), (pair, ["gate", "up"]), (row, ["output"])])
@pytest.mark.parametrize("put_off", [False, True])
def test_compiled_operators_have_gradients_of_the_given_tensors(
    backward: Callable[..., None], names: list[str], put_off: bool
) -> None:
    engine = Engine(spec(model={"family": "llama", "layers": 1}), Comm(RankGrid(layout_of()), 0, torch.device("cpu")))
    engine.initialise(1)
    layers = {name.rpartition(".")[2]: layer for name, layer in linear_layers(engine.model)}
    for layer in layers.values():
        operators.enter(layer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*TOKENS, 32, generator=generator)
    grads = {name: torch.randn(*TOKENS, layers[name].weight.shape[0], generator=generator) for name in names}
    expected = {name: grad.flatten(0, 1).t() @ x.flatten(0, 1) for name, grad in grads.items()}
    store = engine.model.weight_gradients
    if put_off:
        with store.deferred() as tasks:
            backward(layers, x, grads)
        for tensor in (x, *grads.values()):
            tensor.zero_()
        for task in tasks:
            task()
    else:
        backward(layers, x, grads)
    for name, gradient in expected.items():
        torch.testing.assert_close(layers[name].weight.main_grad, gradient)
