"""Memory and communication of ZeRO 2 and 3 by unit (`workers/parallel/data/units.py`): a layer, the embedding, the
output layer. Pure Python.

A rank keeps its part of each unit; whole units are in buffers, of which layers use two in turns, and the embedding and
the output layer a third. Vectors, learned positions, and what several tensor ranks hold (keys and values, routers, of
an adapter's two matrices one) are in no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from manta.workers.accounting.flops import vocabulary_rows
from manta.workers.config import JobSpec, LoraConfig, ModelConfig
from manta.workers.spec.layer_table import LayerTable, layer_table
from manta.workers.spec.parameters import TOKEN_EMBEDDING, first_trained_layer, frozen_names, output_weight


@dataclass(frozen=True)
class UnitSize:
    """Elements of a unit on one tensor rank, alignment not counted."""

    buffer: int
    """Which buffer it uses: 0 and 1 are those of layers."""
    trained: int
    frozen: int

    @property
    def elements(self) -> int:
        """All of them."""
        return self.trained + self.frozen


def units_of(spec: JobSpec) -> tuple[UnitSize, ...]:
    """The units of a stage that is the whole model, in its order; with tied embeddings the first is the last too."""
    return _units(spec.model, spec.layout.tensor, vocabulary_rows(spec), frozen_names(spec), spec.train.lora)


@lru_cache(maxsize=64)
def _units(
    model: ModelConfig, tensor: int, rows: int, frozen: frozenset[str], lora: LoraConfig | None
) -> tuple[UnitSize, ...]:
    def size(buffer: int, sizes: dict[str, int]) -> UnitSize:
        held = sum(elements for name, elements in sizes.items() if name in frozen)
        return UnitSize(buffer, sum(sizes.values()) - held, held)

    table = model.hidden_size * rows
    layers = []
    for layer in range(model.layers):
        operations = layer_table(model, tensor, layer, lora)
        weights = (each for each in operations.weights if not each.is_vector and each.copies == 1)
        own = size(layer % 2, {f"layers.{layer}.{each.name}.weight": each.elements for each in weights})
        of_adapters = sum(operations.adapters.values()) - shared_adapter_elements(operations, tensor)
        layers.append(replace(own, trained=own.trained + of_adapters))
    ends = [size(2, {name: table}) for name in (TOKEN_EMBEDDING, output_weight(model))]
    return (ends[0], *layers) if model.tie_embeddings else (ends[0], *layers, ends[1])


def shared_adapter_elements(layer: LayerTable, tensor: int) -> int:
    """Elements of a layer's adapters of which `tensor` ranks hold the same."""
    if tensor == 1:
        return 0
    return sum(
        rows * columns
        for products in layer.products
        for weight in products.weights
        for name, (rows, columns) in weight.adapter_shapes.items()
        if name.endswith("lora_b" if products.sums else "lora_a") or weight.copies > 1
    )


def buffer_elements(units: Sequence[UnitSize], of_unit: Callable[[UnitSize], int]) -> int:
    """Elements of all buffers, each as large as the largest of its units, of which `of_unit` elements are there."""
    largest: dict[int, int] = {}
    for unit in units:
        largest[unit.buffer] = max(largest.get(unit.buffer, 0), of_unit(unit))
    return sum(largest.values())


def gathered_elements(spec: JobSpec, micro_batches: int) -> int:
    """Elements of weights that a rank has after all gathers of a step under ZeRO 3, its own parts included: of each
    unit forward and backward, unless it is still in its buffer."""
    units, total = list(units_of(spec)), 0
    path = [*units, units[0]] if spec.model.tie_embeddings else units
    first = max(0, first_trained_layer(spec))
    backward = path[1 + first : 1 + spec.model.layers][::-1]
    present: dict[int, UnitSize | None] = {}
    for unit in [*path, *backward] * micro_batches:
        if present.get(unit.buffer) is not unit:
            total, present[unit.buffer] = total + unit.elements, unit
    return total


def reduced_elements(spec: JobSpec, micro_batches: int) -> int:
    """Elements of gradients that are reduced in a step under ZeRO 2 and 3, except for those in no unit."""
    return micro_batches * sum(unit.trained for unit in units_of(spec))
