"""What operators leave for later does not depend on memory that compiled code uses again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_specs import layout_of, spec

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.model.stage import linear_layers
from manta.workers.parallel.tensor import compiled_operators as operators
from manta.workers.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear

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
