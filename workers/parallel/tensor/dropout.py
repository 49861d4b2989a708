"""Dropout that is the same under every layout: whether an element is kept is a hash of what it is in the whole model
(seed, global sample, place in the model, row, column), never of where it is computed. Masks take one byte an element.

The hash is a multiply-xorshift finaliser on 32 bits, in the manner of counter-based generators (Salmon et al. 2011):
nothing is carried from one element to the next, so any part of a tensor can be masked by itself, and recomputation
needs no generator state. Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from manta.workers.parallel.tensor.positions import Positions

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # as signed 32-bit numbers; integer overflow wraps
_STRIDE = 0x9E3779B9 - 2**32  # 2^32 / golden ratio: spreads consecutive numbers


def sample_keys(seed: int, samples: Sequence[int], device: torch.device) -> torch.Tensor:
    """One 32-bit key a global sample: int32 [b]."""
    keys = [_mix_integer(sample * 0x9E3779B97F4A7C15 + seed * 0xBF58476D1CE4E5B9) for sample in samples]
    return torch.tensor(keys, dtype=torch.int32).to(device, non_blocking=True)


def _mix_integer(value: int) -> int:
    """Signed 32 bits of the SplitMix64 finaliser (Steele et al. 2014)."""
    value &= 2**64 - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    value = (value ^ (value >> 31)) >> 32
    return value - 2**32 if value >= 2**31 else value


def derived_keys(keys: torch.Tensor, numbers: torch.Tensor | int) -> torch.Tensor:
    """Keys of the things numbered `numbers` (a number, or int32), derived from `keys`; both are broadcast."""
    if isinstance(numbers, int):
        wrapped = (numbers * _STRIDE + 2**31) % 2**32 - 2**31
        return _mix(keys + wrapped)
    return _mix(keys + numbers * _STRIDE)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Finaliser: every bit of the result depends on every bit of int32 `bits`, which it overwrites."""
    for shift, multiplier in ((16, _MULTIPLIERS[0]), (15, _MULTIPLIERS[1])):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def kept(row_keys: torch.Tensor, columns: int, rate: float, first: int = 0) -> torch.Tensor:
    """Which elements dropout keeps: bool [*rows, columns] for row keys int32 [*rows], of the columns from number
    `first` on. Computed block by block: the hash is four times as wide as the mask, and stays in the cache."""
    numbers = torch.arange(first, first + columns, dtype=torch.int32, device=row_keys.device)
    threshold = int(rate * 2**32) - 2**31
    keys_r1 = row_keys.reshape(-1, 1)
    mask_rc = torch.empty(len(keys_r1), columns, dtype=torch.bool, device=row_keys.device)
    step = max(1, (2**24 if row_keys.is_cuda else 2**19) // columns)
    for first in range(0, len(keys_r1), step):
        rows = slice(first, first + step)
        torch.ge(derived_keys(keys_r1[rows], numbers), threshold, out=mask_rc[rows])
    return mask_rc.view(*row_keys.shape, columns)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None, None


def dropout(x_sbh: torch.Tensor, keys_b: torch.Tensor, rate: float, positions: Positions) -> torch.Tensor:
    """Dropout of [s or s/t, b, h], whose rows are at these positions of the sequence; `keys_b` belong to the samples
    and the place in the model."""
    mask = kept(derived_keys(keys_b, positions.numbers(x_sbh.device).unsqueeze(-1)), x_sbh.shape[-1], rate)
    return _Dropout.apply(x_sbh, mask, 1.0 / (1.0 - rate))
