"""The result of one check. Pure Python."""

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
