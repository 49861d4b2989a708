"""Requirements of 8-bit products on a JobSpec. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workers.config import JobSpec, ModelConfig
from workers.spec.divisors import nearest_multiple
from workers.spec.families import FAMILIES
from workers.spec.problems import Problem

UNIT = 16
"""All widths of 8-bit products must be multiples of this."""


def fp8_fits(spec: JobSpec) -> Iterator[Problem]:
    """The rule, as in `rules.py`. Widths of custom models are checked by the engine."""
    if spec.train.fp8 == "off":
        return
    if spec.train.precision != "bf16":
        problem = (
            f"train.fp8 needs precision bf16, from which it converts matrices to 8 bits, not {spec.train.precision}"
        )
        yield Problem("train.precision", problem, "bf16")
    layout, length = spec.layout, spec.model.sequence_length
    if length % UNIT:
        problem = f"with train.fp8 sequence_length ({length}) must be a multiple of {UNIT}, like all widths of products"
        unit = math.lcm(UNIT, layout.tensor if layout.sequence_parallel_on else 1)
        yield Problem("model.sequence_length", problem, str(nearest_multiple(unit, length)))
    if spec.model.family in FAMILIES and spec.model.is_counted:
        yield from _widths_fit(spec.model, layout.tensor)


def _widths_fit(model: ModelConfig, tensor: int) -> Iterator[Problem]:
    """Checks widths that are split over `tensor` ranks."""
    hidden, heads = model.hidden_size, model.heads
    if heads % tensor or (model.head_dim is None and hidden % heads):
        return  # the heads are wrong first
    if hidden % UNIT:
        unit = math.lcm(UNIT, heads) if model.head_dim is None else UNIT
        problem = f"with train.fp8 hidden_size ({hidden}) must be a multiple of {UNIT}"
        yield Problem("model.hidden_size", problem, str(nearest_multiple(unit, hidden)))
        return
    queries, values = heads // tensor, 2 * max(1, model.key_value_heads // tensor)
    unit = UNIT // math.gcd(UNIT, queries, values)
    if model.head_size % unit:
        problem = (
            f"with train.fp8 the heads of each tensor rank must be a multiple of {UNIT} wide: {queries} of queries and "
            f"{values} of keys and values, {model.head_size} each, are not"
        )
        yield Problem("model.head_dim", problem, str(nearest_multiple(unit, model.head_size)))
    if model.ffn_size % tensor == 0 and model.ffn_size // tensor % UNIT:
        problem = f"with train.fp8 ffn_hidden_size ({model.ffn_size}) must be a multiple of {UNIT} x parallel.tensor"
        nearest = str(nearest_multiple(UNIT * tensor, model.ffn_size))
        yield Problem("model.ffn_hidden_size", problem, nearest)
