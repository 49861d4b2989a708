"""Rotary positions (Su et al. 2021, arXiv:2104.09864): elements i and i + d/2 of each head are rotated by an angle
proportional to the position, so that a query times a key depends only on their distance.

Shapes: s sequence, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from manta.workers.config import RopeConfig, RopeScaling
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions

_Key = tuple[torch.dtype, torch.device]


class Rotary:
    """Rotates queries and keys. The tables are shared by all layers of a stage."""

    def __init__(self, rope: RopeConfig, head_size: int, length: int):
        """`length`: of the longest sequence, in tokens."""
        frequencies, self._scale = frequencies_of(rope, head_size)
        self._angles_sd = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
        self._tables: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_runs: dict[tuple[_Key, Positions], tuple[torch.Tensor, torch.Tensor]] = {}
        """Rows of the tables for positions that are not consecutive."""

    def __call__(self, x: torch.Tensor, head_size: int, parts: int, rotated: int, run: ForwardPass) -> torch.Tensor:
        """x [s, b, ...], or [b, s, ...] with `batch_first`, whose last dimensions hold (head, part, d): the first
        `rotated` of each head's `parts` are rotated, in place unless the code is being compiled."""
        length = run.positions.length
        shape = (1, length, 1, 1, -1) if run.batch_first else (length, 1, 1, 1, -1)
        cos, sin = (table.view(shape) for table in self.tables(x, run.positions))
        if torch.compiler.is_compiling():
            return _rotated_copy(x, cos, sin, parts, rotated, head_size)
        result: torch.Tensor = _Rotation.apply(x, cos, sin, parts, rotated, head_size)
        return result

    def tables(self, x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine at these positions, [rows, d/2], for inputs like x."""
        key = (x.dtype, x.device)
        if key not in self._tables:
            cos, sin = self._angles_sd.cos() * self._scale, self._angles_sd.sin() * self._scale
            self._tables[key] = cos.to(x.device, x.dtype), sin.to(x.device, x.dtype)
        cos, sin = self._tables[key]
        if len(positions.runs) == 1:
            return positions.rows_of(cos), positions.rows_of(sin)
        if (key, positions) not in self._of_runs:
            self._of_runs[key, positions] = positions.rows_of(cos), positions.rows_of(sin)
        return self._of_runs[key, positions]

    def all_tables(self) -> list[torch.Tensor]:
        """The tables made so far."""
        return [table for pairs in (self._tables, self._of_runs) for pair in pairs.values() for table in pair]


class _Rotation(torch.autograd.Function):
    """A rotation in place; its backward rotates the gradient back and needs nothing that forward computed.

    Autograd is not informed that it is in place: it would refuse if x is a view of a product's result. Nothing else may
    hold x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, parts: int, rotated: int, head_size: int
    ) -> torch.Tensor:
        ctx.cos, ctx.sin, ctx.shape = cos, sin, (parts, rotated, head_size)
        _rotate(x, cos, sin, *ctx.shape)
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        _rotate(grad, ctx.cos, -ctx.sin, *ctx.shape)
        return grad, None, None, None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, parts: int, rotated: int, head_size: int) -> None:
    turn_halves(*_halves(x, parts, rotated, head_size), cos, sin)


def turn_halves(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate both halves of what is rotated, in place."""
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).addcmul_(before, sin)


def _by_heads(x: torch.Tensor, parts: int, head_size: int) -> torch.Tensor:
    """[s, b, a, parts, d]; there may be no samples."""
    return x.view(*x.shape[:2], math.prod(x.shape[2:]) // (parts * head_size), parts, head_size)


def _halves(x: torch.Tensor, parts: int, rotated: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of the parts that are rotated: [s, b, a, parts, d/2]."""
    heads = _by_heads(x, parts, head_size)[..., :rotated, :]
    return heads[..., : head_size // 2], heads[..., head_size // 2 :]


def _rotated_copy(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, parts: int, rotated: int, head_size: int
) -> torch.Tensor:
    first, second = _halves(x, parts, rotated, head_size)
    rest = _by_heads(x, parts, head_size)[..., rotated:, :]
    heads = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([heads, rest], -2).view(x.shape)


def frequencies_of(rope: RopeConfig, head_size: int) -> tuple[torch.Tensor, float]:
    """Angles in radians per token, fp64 [d/2], and a factor for queries and keys."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    frequencies = rope.theta**-exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _blended(frequencies, scaling.factor, _kept_by_llama3(frequencies, scaling)), 1.0
    scale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor
    return _blended(frequencies, scaling.factor, _kept_by_yarn(rope.theta, head_size, scaling)), scale


def _blended(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    """Frequencies kept to the degree `kept`, and divided by the factor to the rest (arXiv:2309.00071, eq. 13)."""
    return frequencies * kept + frequencies / factor * (1.0 - kept)


def _kept_by_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Linear in the number of rotations within the original length (Llama 3.1, arXiv:2407.21783, section 3.4.2, and its
    published code)."""
    assert scaling.original_length is not None
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(theta: float, head_size: int, scaling: RopeScaling) -> torch.Tensor:
    """Linear in the index of the frequency, between those that rotate beta_fast and beta_slow times within the original
    length, rounded outwards, like YaRN's published code (arXiv:2309.00071, section 3.2)."""
    length = scaling.original_length
    assert length is not None

    def number_of(turns: float) -> float:
        return head_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(number_of(scaling.beta_fast)), 0)
    last = min(math.ceil(number_of(scaling.beta_slow)), head_size - 1)
    numbers = torch.arange(head_size // 2, dtype=torch.float64)
    return 1.0 - ((numbers - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
