"""The parameters of a model by their layout-independent names, and which of them a job trains. Pure Python.

`train.frozen` holds patterns of names, each for a parameter or for all parameters of a part of the model. `*` matches
any characters, and `first-last` in place of a layer's number matches a range of layers: `embedding`, `layers.0-3`,
`*.mlp`, `layers.7.attention.*norm`. With `train.lora` only its adapters are trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from manta.workers.config import JobSpec, LoraConfig, ModelConfig
from manta.workers.schedules.stages import layers_of
from manta.workers.spec.layer_table import layer_table

TOKEN_EMBEDDING = "embedding.token.weight"
"""Layout-independent name of the weight that the output layer may share."""
_RANGE = re.compile(r"(\d+)-(\d+)")


TILE_ROWS = 128
"""Rows of an output layer in one tile of GPU kernels."""
_LARGE = 16
"""A vocabulary is padded to whole tiles if it has at least this many tiles per tensor rank; below, padding costs too
much."""


def padded_rows(vocabulary_size: int, tensor: int) -> int:
    """Rows of the token embedding, and of the output layer, over `tensor` tensor ranks: a multiple of 128 t for large
    vocabularies, as in Megatron-LM (50257 becomes 50304, or 51200 with t = 8), otherwise of t."""
    unit = tensor * TILE_ROWS if vocabulary_size >= tensor * TILE_ROWS * _LARGE else tensor
    return -(-vocabulary_size // unit) * unit


def output_weight(model: ModelConfig) -> str:
    """Name of the weight that produces the logits."""
    return TOKEN_EMBEDDING if model.tie_embeddings else "output.weight"


def parameters_of_ends(model: ModelConfig, rows: int, first: bool, last: bool) -> dict[str, int]:
    """Elements of each parameter outside of layers, by name, of a rank that has the first virtual stage, the last, or
    both; `rows`: those of the token embedding and of the output layer. A shared table counts once."""
    h = model.hidden_size
    sizes = {TOKEN_EMBEDDING: rows * h} if first else {}
    if first and not model.parts.rotary:
        sizes["embedding.position.weight"] = model.sequence_length * h
    if last:
        has_bias = model.bias and not model.parts.rms_norm
        sizes |= {f"final_norm.{name}": h for name in (["weight", "bias"] if has_bias else ["weight"])}
        sizes[output_weight(model)] = rows * h
    return sizes


@lru_cache(maxsize=64)
def parameter_names(model: ModelConfig, lora: LoraConfig | None = None) -> tuple[str, ...]:
    """All parameters, with those of adapters. Not for custom models, whose parameters are unknown."""
    tables = [layer_table(model, 1, layer, lora).parameters for layer in range(model.layers)]
    layers = [f"layers.{layer}.{name}" for layer, names in enumerate(tables) for name in names]
    return (*parameters_of_ends(model, 1, first=True, last=True), *layers)


def matching(pattern: str, names: tuple[str, ...]) -> list[str]:
    """The `names` that match the pattern."""
    expression = _expression(pattern)
    return [name for name in names if _matches(expression, name)]


def _expression(pattern: str) -> re.Pattern[str]:
    parts = []
    for part in pattern.split("."):
        places = _RANGE.fullmatch(part)
        if places is None:
            parts.append(".*".join(map(re.escape, part.split("*"))))
        else:
            parts.append(f"(?P<place{len(parts)}_{places[1]}_{places[2]}>\\d+)")
    return re.compile(r"\.".join(parts) + r"(\..*)?")


def _matches(expression: re.Pattern[str], name: str) -> bool:
    match = expression.fullmatch(name)
    if match is None:
        return False
    for group in expression.groupindex:
        _, first, last = group.split("_")
        if not int(first) <= int(match[group]) <= int(last):
            return False
    return True


def frozen_names(spec: JobSpec) -> frozenset[str]:
    """The parameters that the job does not train."""
    return _frozen(spec.model, _patterns(spec))


def is_partly_frozen(spec: JobSpec) -> bool:
    """Whether a part of the model is not trained."""
    return bool(_patterns(spec))


class LayerKind(NamedTuple):
    """What layers have in common that have the same operations, windows of attention aside, and the same parameters
    frozen."""

    has_experts: bool
    frozen: frozenset[str] = frozenset()
    """Names within the layer of what the job does not train."""


def layer_kinds(spec: JobSpec) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    return _layer_kinds(spec.model, _patterns(spec))


@lru_cache(maxsize=64)
def _layer_kinds(model: ModelConfig, patterns: tuple[str, ...]) -> tuple[LayerKind, ...]:
    names: list[list[str]] = [[] for _ in range(model.layers)]
    for name in _frozen(model, patterns):
        if name.startswith("layers."):
            _, number, inner = name.split(".", 2)
            names[int(number)].append(inner)
    return tuple(LayerKind(model.has_experts(layer), frozenset(each)) for layer, each in enumerate(names))


def layers_of_kinds(spec: JobSpec, layers: Iterable[int]) -> list[tuple[int, int]]:
    """For each kind among these layers, one of them and their number."""
    kinds, known = layer_kinds(spec), dict[LayerKind, tuple[int, int]]()
    for layer in layers:
        known[kinds[layer]] = layer, known.get(kinds[layer], (layer, 0))[1] + 1
    return list(known.values())


def layers_differ(spec: JobSpec) -> bool:
    """Whether layers may be of several kinds."""
    model = spec.model
    return bool(spec.train.frozen) or (model.moe is not None and 0 < len(model.expert_layers) < model.layers)


def _patterns(spec: JobSpec) -> tuple[str, ...]:
    """Patterns of the model's parameters that the job does not train; those of adapters are not among them."""
    return spec.train.frozen if spec.train.lora is None else ("*",)


@lru_cache(maxsize=64)
def _frozen(model: ModelConfig, patterns: tuple[str, ...]) -> frozenset[str]:
    if not patterns:
        return frozenset()
    return frozenset(name for pattern in patterns for name in matching(pattern, parameter_names(model)))


def first_trained_layer(spec: JobSpec) -> int:
    """Index of the first layer with a trained parameter: all layers before it, and the embedding, are frozen.
    `model.layers` if that is the final norm or the output layer; -1 if it is the embedding."""
    if spec.train.lora is not None:
        return 0
    return _first_trained_layer(spec.model, spec.train.frozen) if spec.train.frozen else -1


@lru_cache(maxsize=64)
def _first_trained_layer(model: ModelConfig, patterns: tuple[str, ...]) -> int:
    frozen = _frozen(model, patterns)
    places = [name.split(".") for name in parameter_names(model) if name not in frozen]
    if any(parts[0] == "embedding" for parts in places):
        return -1
    return min((int(parts[1]) for parts in places if parts[0] == "layers"), default=model.layers)


def needs_gradient(spec: JobSpec) -> tuple[bool, ...]:
    """For each virtual stage, in model order, whether backward has work there: it, or one before it, has trained
    parameters. True for the last one, since some parameters are trained."""
    layout, model = spec.layout, spec.model
    first, count = first_trained_layer(spec), layout.pipeline * layout.virtual_stages
    if first <= 0:
        return (True,) * count
    ends = [layers_of(model.layers, layout, index).stop for index in range(count)]
    return (*(first < end for end in ends[:-1]), True)
