"""Formats that weights can be written in."""

from __future__ import annotations

from typing import Literal

Format = Literal["hf", "safetensors"]
"""hf: what transformers reads; safetensors: our tensors with our names."""
Dtype = Literal["fp32", "bf16", "fp16"]
