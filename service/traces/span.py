"""A span, and the numbers by which all control planes know it. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

Value = str | int | float | Sequence[int]
"""Of an attribute."""


@dataclass(frozen=True)
class Span:
    """Something that took time and is over. The same thing always has the same numbers, whichever control plane sends
    it."""

    name: str
    trace_id: int
    """128 bits; of the job."""
    span_id: int
    """64 bits."""
    began_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds, not before `began_at`."""
    attributes: Mapping[str, Value]
    parent_id: int | None = None
    """`span_id` of what it is a part of."""
    problem: str | None = None
    """Why it did not come to its end; None: it did."""


def trace_id(job_id: str) -> int:
    """The number of the trace that holds all that happens to a job."""
    return _number(job_id, 16)


def span_id(job_id: str, generation: int, name: str) -> int:
    """The number of what has this name in a generation of a job."""
    return _number(f"{job_id}/{generation}/{name}", 8)


def _number(of: str, size: int) -> int:
    """`size` bytes that are not all zero, which would stand for no number."""
    return int.from_bytes(sha256(of.encode()).digest()[:size]) or 1
