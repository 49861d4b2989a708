"""A span, and the ids by which all control planes know it. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

Value = str | int | float | Sequence[int]
"""Value of an attribute."""


@dataclass(frozen=True)
class Span:
    """Something that took time and is over. The same thing always has the same ids, whichever control plane sends
    it."""

    name: str
    trace_id: int
    """128 bits; the same for the whole job."""
    span_id: int
    """64 bits."""
    began_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds, not before `began_at`."""
    attributes: Mapping[str, Value]
    parent_id: int | None = None
    """`span_id` of the span that contains it."""
    problem: str | None = None
    """Why it did not complete; None: it did."""


def trace_id(job_id: str) -> int:
    """The id of the trace that contains everything that happens to a job."""
    return _number(job_id, 16)


def span_id(job_id: str, generation: int, name: str) -> int:
    """The id of the span with this name in a generation of a job."""
    return _number(f"{job_id}/{generation}/{name}", 8)


def _number(of: str, size: int) -> int:
    """`size` bytes that are not all zero, since zero means no id."""
    return int.from_bytes(sha256(of.encode()).digest()[:size]) or 1
