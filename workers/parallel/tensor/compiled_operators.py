"""The parallel products as operators that are opaque to torch.compile.

A compiled block contains them by name. They look up their layer when they run, by the address of its weight, so neither
a change of groups nor another layer of the same shape needs a new compilation. Weight gradients are added elsewhere
(`Region.weight_gradients`), as a side effect that the compiler need not know of: it sees that the backward operators
return the input's gradient, and it never drops or repeats them.

torch's registry of operators belongs to the process, so the table of layers does too; an engine that compiles enters
its layers there, and they leave it with the engine.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from manta.workers.parallel.tensor.adapters import LayerAdapters, adaptation_of
from manta.workers.parallel.tensor.linear_autograd import column_backward, column_forward, row_backward, row_forward
from manta.workers.parallel.tensor.sequence_parallel import Region, gather, sum_partial


class Product(Protocol):
    """A parallel layer: one weight, perhaps a bias and adapters, and its communication."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    region: Region
    adapters: LayerAdapters | None


_LAYERS_BY_WEIGHT: WeakValueDictionary[int, Any] = WeakValueDictionary()


def enter(layer: Product) -> None:
    """Let the operators find `layer` by its weight, which must not be moved from then on."""
    _LAYERS_BY_WEIGHT[layer.weight.data_ptr()] = layer


def _product_of(weight: torch.Tensor) -> Product:
    place: Product = _LAYERS_BY_WEIGHT[weight.data_ptr()]
    return place


def _to_keep(place: Product, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that products for weights are computed from. If these are deferred they are copied: after an operator has
    returned, compiled code reuses the memory of its inputs."""
    return [tensor.clone() if place.region.weight_gradients.keeping else tensor for tensor in tensors]


@torch.library.custom_op("manta::column_parallel", mutates_args=())
def column_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gathers: int) -> torch.Tensor:
    """x W^T + b, x gathered along the sequence from `gathers` ranks."""
    place = _product_of(weight)
    return column_forward(x, [weight], [bias], place.region, adaptation_of(place.adapters))[0]


@column_parallel.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gathers: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] * gathers, *x.shape[1:-1], weight.shape[0]))


@torch.library.custom_op("manta::column_parallel_backward", mutates_args=())
def column_parallel_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    """The gradient of x."""
    place = _product_of(weight)
    grad, x = _to_keep(place, grad, x)
    grad_x = column_backward([grad], x, [place.weight], [place.bias], place.region, adaptation_of(place.adapters))
    return grad_x if grad_x.is_contiguous() else grad_x.contiguous()


@column_parallel_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("manta::column_parallel_pair", mutates_args=())
def column_parallel_pair(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
    gathers: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two such products of the same x, which is gathered once."""
    places = _product_of(first), _product_of(second)
    adapted = adaptation_of(*(place.adapters for place in places))
    one, other = column_forward(x, [first, second], [first_bias, second_bias], places[0].region, adapted)
    return one, other


@column_parallel_pair.register_fake
def _(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
    gathers: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (x.shape[0] * gathers, *x.shape[1:-1])
    return x.new_empty((*rows, first.shape[0])), x.new_empty((*rows, second.shape[0]))


@torch.library.custom_op("manta::column_parallel_pair_backward", mutates_args=())
def column_parallel_pair_backward(
    grad: torch.Tensor, other_grad: torch.Tensor, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """The gradient of x, which is reduced once."""
    one, other = _product_of(first), _product_of(second)
    weights, biases = [one.weight, other.weight], [one.bias, other.bias]
    *grads, x = _to_keep(one, grad, other_grad, x)
    adapted = adaptation_of(one.adapters, other.adapters)
    grad_x = column_backward(grads, x, weights, biases, one.region, adapted)
    return grad_x if grad_x.is_contiguous() else grad_x.contiguous()


@column_parallel_pair_backward.register_fake
def _(
    grad: torch.Tensor, other_grad: torch.Tensor, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("manta::row_parallel", mutates_args=())
def row_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scatters: int) -> torch.Tensor:
    """The sum over ranks of x W^T, plus b, scattered along the sequence over `scatters` ranks."""
    place = _product_of(weight)
    return row_forward(x, weight, bias, place.region, adapted=adaptation_of(place.adapters))


@row_parallel.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scatters: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] // scatters, *x.shape[1:-1], weight.shape[0]))


@torch.library.custom_op("manta::row_parallel_backward", mutates_args=())
def row_parallel_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scatters: int) -> torch.Tensor:
    """The gradient of x."""
    place = _product_of(weight)
    kept_grad, kept_x = _to_keep(place, grad.contiguous(), x)
    adapted = adaptation_of(place.adapters)
    return row_backward(kept_grad, lambda: kept_x, place.weight, place.bias, place.region, adapted)


@row_parallel_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scatters: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("manta::entered", mutates_args=())
def entered(x: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    """x gathered along the sequence from `gathers` ranks, in the region of the layer with this weight."""
    full = gather(x, _product_of(weight).region)
    return full.clone() if full is x else full


@entered.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] * gathers, *x.shape[1:]))


@torch.library.custom_op("manta::entered_backward", mutates_args=())
def entered_backward(grad: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    """The gradient of x, summed over ranks."""
    return sum_partial(grad.clone(memory_format=torch.contiguous_format), _product_of(weight).region)


@entered_backward.register_fake
def _(grad: torch.Tensor, weight: torch.Tensor, gathers: int) -> torch.Tensor:
    return grad.new_empty((grad.shape[0] // gathers, *grad.shape[1:]))


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, ranks = inputs
    ctx.save_for_backward(weight)
    ctx.ranks = ranks


def _entered_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return entered_backward(grad, *ctx.saved_tensors, ctx.ranks), None, None


def _keep_input(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, ranks = inputs
    ctx.save_for_backward(x, weight)
    ctx.ranks = ranks


def _keep_input_of_pair(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, first, _, second, *_ = inputs
    ctx.save_for_backward(x, first, second)


def _pair_gradient(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return column_parallel_pair_backward(*grads, *ctx.saved_tensors), None, None, None, None, None


def _column_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    x, weight = ctx.saved_tensors
    return column_parallel_backward(grad, x, weight, ctx.ranks), None, None, None


def _row_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    x, weight = ctx.saved_tensors
    return row_parallel_backward(grad, x, weight, ctx.ranks), None, None, None


entered.register_autograd(_entered_gradient, setup_context=_keep_place)
column_parallel.register_autograd(_column_gradient, setup_context=_keep_input)
column_parallel_pair.register_autograd(_pair_gradient, setup_context=_keep_input_of_pair)
row_parallel.register_autograd(_row_gradient, setup_context=_keep_input)
