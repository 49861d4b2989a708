"""Checks a machine and what a service would use there: for each thing, whether it is sufficient, and if not, what would
help. `machine`, `packages`, `stores`: the checks. `checkup`: all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One checked thing."""

    subject: str
    """What was checked, in a word or two."""
    verdict: Verdict
    """`problem`: jobs will fail, or the service will not start; `warning`: some jobs may fail; `skipped`: it could not
    or need not be checked."""
    message: str
    """What was seen."""
    advice: str = ""
    """What to do about it."""
