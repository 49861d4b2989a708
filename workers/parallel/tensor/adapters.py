"""Low-rank adapters beside the products of linear layers (LoRA, arXiv:2106.09685): y = x W^T + scale drop(x) A^T B^T,
where A [r, i] and B [o, r] are trained and W is not.

An adapter belongs to a logical matrix (queries, keys ...), whose rows may be blocks of a weight that several of them
share. With tensor parallelism nothing more is sent. Where W is split by rows, each rank has all of A and its rows of B;
where W is split by columns, each has its columns of A and all of B, which it applies to its own part of the sum before
that is reduced. What each rank has all of has a gradient that is summed over ranks once per step
(`ParameterShard.partial`). Backward computes drop(x) A^T again, so only x is kept.

Shapes: s sequence, b micro-batch, n = s b tokens, i input width, o output width, r rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from manta.workers.config import LoraConfig
from manta.workers.parallel.tensor.dropout import derived_keys, kept
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.parallel.tensor.shards import ParameterShard, ShardedModule
from manta.workers.parallel.tensor.weight_gradients import WeightGradients
from manta.workers.spec.layer_table import Rows, Weight


@dataclass(frozen=True)
class Adapter:
    """A and B of one logical matrix, on one rank."""

    a: nn.Parameter
    b: nn.Parameter
    rows: Rows
    """Rows of the weight beside which it is: columns of the result."""

    def part_of(self, y_no: torch.Tensor) -> torch.Tensor:
        """The logical matrix's columns of a result: [n, blocks, columns of a block], a view."""
        rows = self.rows
        return y_no.view(len(y_no), rows.blocks, rows.stride)[:, :, rows.first : rows.first + rows.length]


@dataclass(frozen=True)
class InputDropout:
    """Dropout of one micro-batch's inputs of adapters."""

    keys_b: torch.Tensor
    """Keys of the samples."""
    positions: Positions
    """Positions of the tokens in the sequence, of all tensor ranks together."""
    batch_first: bool
    """Whether inputs are [b, s, i] instead of [s, b, i]."""

    def row_keys(self, place: int) -> torch.Tensor:
        """Keys of the rows at a place in the model: int32 [s, b], or [b, s] with `batch_first`."""
        keys_b, numbers_s = derived_keys(self.keys_b, place), self.positions.numbers(self.keys_b.device)
        if self.batch_first:
            return derived_keys(keys_b.unsqueeze(-1), numbers_s)
        return derived_keys(keys_b, numbers_s.unsqueeze(-1))


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of one linear layer."""

    adapters: tuple[Adapter, ...]
    scale: float
    rate: float
    """Probability of dropout."""
    place: int
    """Place in the model of the dropout of their input."""
    first_column: int
    """Index of this rank's first column of the input."""


class AdaptedLinear(ShardedModule):
    """A linear layer with a `weight`, beside which there may be adapters."""

    weight: nn.Parameter
    region: Region

    def __init__(self) -> None:
        super().__init__()
        self.adapters: LayerAdapters | None = None

    def add_adapters(self, weight: Weight, lora: LoraConfig, place: int) -> None:
        """Register the parameters of `weight.adapters`; `place`: that of the dropout of their input."""
        shard, rank = self.shards["weight"], lora.rank
        rows, inputs = self.weight.shape
        by_rows = shard.split_dim == 0
        shared = self.region.tensor_size > 1
        # What a rank has all of alone counts as split, like the weight: its gradient is reduced during backward.
        whole = ParameterShard((), None if shared else 0, partial=shared)
        made = []
        for each in weight.adapters:
            name, own = each.name.rpartition(".")[2], each.length * each.blocks
            start, full = shard.start * own // rows, shard.shape[0] * own // rows
            of_a = whole if by_rows else ParameterShard((), 1, shard.start)
            of_b = ParameterShard((), 0, start, copies=shard.copies) if by_rows else whole
            values: dict[str, Any] = {"bound": shard.shape[1] ** -0.5} if lora.init == "default" else {"std": 1 / rank}
            of_a = replace(of_a, shape=(rank, shard.shape[1]), beside=f"{name}.lora_a", **values)
            of_b = replace(of_b, shape=(full, rank), beside=f"{name}.lora_b")
            a = self.add_parameter(f"{name}_lora_a", (rank, inputs), of_a)
            made.append(Adapter(a, self.add_parameter(f"{name}_lora_b", (own, rank), of_b), each))
        scale = lora.alpha / (rank if lora.scaling == "standard" else math.sqrt(rank))
        column = 0 if by_rows else shard.start
        self.adapters = LayerAdapters(tuple(made), scale, lora.dropout, place, column)


@dataclass(frozen=True)
class Adaptation:
    """The adapters of one or more products of the same input, in one pass of a micro-batch."""

    layers: tuple[LayerAdapters | None, ...]
    """Adapters of each product."""
    dropout: InputDropout | None

    @cached_property
    def _first(self) -> LayerAdapters:
        """Any layer with adapters: all have the same scale and dropout."""
        return next(each for each in self.layers if each is not None)

    @cached_property
    def _each(self) -> list[tuple[int, Adapter]]:
        """All adapters, each with the number of its product."""
        return [(at, each) for at, layer in enumerate(self.layers) if layer is not None for each in layer.adapters]

    def row_keys(self) -> torch.Tensor | None:
        """Keys of the dropout of all rows of the input, as `InputDropout.row_keys`; None without dropout."""
        return None if self.dropout is None else self.dropout.row_keys(self._first.place)

    def _dropped(self, x_ni: torch.Tensor, keys_n: torch.Tensor | None) -> torch.Tensor:
        """Dropout of x, or of the gradient of what dropout has returned."""
        if keys_n is None:
            return x_ni
        first, rate = self._first.first_column, self._first.rate
        return (x_ni * kept(keys_n, x_ni.shape[1], rate, first)).mul_(1.0 / (1.0 - rate))

    def inner(self, x_ni: torch.Tensor, keys: torch.Tensor | None) -> list[torch.Tensor]:
        """scale drop(x) A^T [n, r] for each adapter; `keys`: the `row_keys` of these rows."""
        dropped_ni = self._dropped(x_ni, None if keys is None else keys.reshape(-1))
        return [(dropped_ni @ each.a.t()).mul_(self._first.scale) for _, each in self._each]

    def add(self, ys_no: Sequence[torch.Tensor], inner_nr: Sequence[torch.Tensor]) -> None:
        """Add what the adapters make of `inner` to the result of each product."""
        for (at, adapter), z_nr in zip(self._each, inner_nr, strict=True):
            if len(adapter.b) == ys_no[at].shape[1]:
                ys_no[at].addmm_(z_nr, adapter.b.t())
            else:
                part = adapter.part_of(ys_no[at])
                part.add_((z_nr @ adapter.b.t()).view(part.shape))

    def add_outputs(self, ys: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Add to the result [..., o] of each product what its adapters make of the whole input [..., i]."""
        inner_nr = self.inner(x.reshape(-1, x.shape[-1]), self.row_keys())
        self.add([y.view(-1, y.shape[-1]) for y in ys], inner_nr)

    def add_input_gradient(self, total_ni: torch.Tensor, grads_no: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add the adapters' gradient of the input. Returns the gradient of each adapter's drop(x) A^T, [n, r]."""
        keys, inner_nr, own_ni = self.row_keys(), [], total_ni
        if keys is not None:
            own_ni = torch.zeros_like(total_ni)
        for at, adapter in self._each:
            part_no = adapter.part_of(grads_no[at]).reshape(-1, len(adapter.b))
            inner_nr.append((part_no @ adapter.b).mul_(self._first.scale))
            own_ni.addmm_(inner_nr[-1], adapter.a)
        if keys is not None:
            total_ni.add_(self._dropped(own_ni, keys.view(-1)))
        return inner_nr

    def add_weight_gradients(
        self,
        store: WeightGradients,
        grads_no: Sequence[torch.Tensor],
        inner_grads_nr: Sequence[torch.Tensor],
        x_ni: torch.Tensor,
    ) -> None:
        """Add the gradients of A and B, from those of the products and of each drop(x) A^T."""
        keys = self.row_keys()
        dropped_ni = self._dropped(x_ni, None if keys is None else keys.view(-1))
        for (at, adapter), inner_grad_nr in zip(self._each, inner_grads_nr, strict=True):
            inner_nr = (dropped_ni @ adapter.a.t()).mul_(self._first.scale)
            part_no = adapter.part_of(grads_no[at]).reshape(-1, len(adapter.b))
            store.add_product(adapter.b, part_no, inner_nr)
            store.add_product(adapter.a, inner_grad_nr, dropped_ni)


def adaptation_of(*layers: LayerAdapters | None, dropout: InputDropout | None = None) -> Adaptation | None:
    """The adapters of linear layers with a common input; None if there are none. `dropout`: None outside of
    training."""
    return None if all(each is None for each in layers) else Adaptation(layers, dropout)
