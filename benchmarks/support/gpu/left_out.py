"""What does not run, and why: an untested card may fail in any way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.support.report import Report


@contextmanager
def going_on(report: Report, name: str) -> Iterator[None]:
    """What fails inside is noted under `name`, and is no reason to lose the rest."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - an untested card may fail in any way
        lines = str(error).strip().splitlines() or [""]
        report.settings["left_out"][name] = f"{type(error).__name__}: {lines[0]}"
