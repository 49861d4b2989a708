"""Formats that weights can be written in."""

from __future__ import annotations

from typing import Literal

Format = Literal["hf", "safetensors"]
"""What transformers reads; or our own tensors by our own names."""
Dtype = Literal["fp32", "bf16", "fp16"]
