"""Dense peak rates of known GPUs, from their makers' data sheets. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePeak:
    """Peak rates of one device in FLOP/s, without sparsity."""

    name: str
    """Part of the name that the driver reports, in lower case."""
    bf16: float
    """Tensor cores, bfloat16 (float16 where the device has no bfloat16) with fp32 accumulation."""
    fp32: float
    """Plain fp32 units (no TF32)."""

    @property
    def fp8(self) -> float | None:
        """Tensor cores with 8-bit floats: twice the bfloat16 rate on GPUs that have them (from Ada on); else None."""
        return 2 * self.bf16 if self.name.startswith(WITH_8_BITS) else None


WITH_8_BITS = ("b200", "b100", "h200", "h100", "h800", "h20", "l40", "l4")
WITHOUT_BF16 = ("v100", "t4")
# The first match counts, so a longer name must come before a shorter one that it contains.
DEVICE_PEAKS = (
    DevicePeak("b200", bf16=2250e12, fp32=75e12),
    DevicePeak("b100", bf16=1750e12, fp32=60e12),
    DevicePeak("h200 nvl", bf16=835.5e12, fp32=60e12),
    DevicePeak("h200", bf16=989.4e12, fp32=66.9e12),
    DevicePeak("h100 nvl", bf16=835.5e12, fp32=60e12),
    DevicePeak("h100 pcie", bf16=756e12, fp32=51.2e12),
    DevicePeak("h100", bf16=989.4e12, fp32=66.9e12),
    DevicePeak("h800", bf16=989.4e12, fp32=66.9e12),
    DevicePeak("h20", bf16=148e12, fp32=44e12),
    DevicePeak("a100", bf16=312e12, fp32=19.5e12),
    DevicePeak("a800", bf16=312e12, fp32=19.5e12),
    DevicePeak("a40", bf16=149.7e12, fp32=37.4e12),
    DevicePeak("a30", bf16=165e12, fp32=10.3e12),
    DevicePeak("a10g", bf16=70e12, fp32=31.5e12),
    DevicePeak("a10", bf16=125e12, fp32=31.2e12),
    DevicePeak("l40s", bf16=362e12, fp32=91.6e12),
    DevicePeak("l40", bf16=181e12, fp32=90.5e12),
    DevicePeak("l4", bf16=121e12, fp32=30.3e12),
    DevicePeak("v100-sxm", bf16=125e12, fp32=15.7e12),
    DevicePeak("v100", bf16=112e12, fp32=14e12),
    DevicePeak("t4", bf16=65e12, fp32=8.1e12),
)


def known_peak(device_name: str, precision: str = "bf16") -> float | None:
    """Dense peak in FLOP/s of the device that reports `device_name`, or None for an unknown one.

    `precision`: "bf16", "fp32" or "fp8"; also None for a device without fp8.
    """
    known = _known(device_name)
    if known is None:
        return None
    return {"fp32": known.fp32, "fp8": known.fp8}.get(precision, known.bf16)


def has_bf16(device_name: str) -> bool:
    """Whether the device has tensor cores for bfloat16; False for an unknown one."""
    known = _known(device_name)
    return known is not None and not known.name.startswith(WITHOUT_BF16)


def _known(device_name: str) -> DevicePeak | None:
    lowered = device_name.lower()
    # An RTX A4000 is not an A40: a name that ends in a digit must not be followed by another digit.
    return next((peak for peak in DEVICE_PEAKS if re.search(rf"{peak.name}(?!(?<=\d)\d)", lowered)), None)


def peak_of_stages(own: float, types: Sequence[str], precision: str = "bf16") -> float:
    """Mean peak in FLOP/s of the ranks of stages on GPUs of these `types`, from their rates at `precision`, if those of
    the first stage have `own`. If a type is unknown, all are assumed to be like the first."""
    peaks = [known_peak(type, precision) for type in types]
    known = [peak for peak in peaks if peak is not None]
    return own if len(known) < len(peaks) or not known else own * sum(known) / len(known) / known[0]
