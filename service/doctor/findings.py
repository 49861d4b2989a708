"""What a look at one thing has shown. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    """What it is, in a word or two."""
    verdict: Verdict
    """`problem`: jobs will fail, or the service will not start; `warning`: some may; `skipped`: it could not or need
    not be looked at."""
    message: str
    """What was seen."""
    advice: str = ""
    """What to do about it."""


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
