"""Fixtures of more than one folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on a Ray cluster."""
    for item in items:
        if "e2e" in item.path.parts or "ray_head" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Eight processes that run programs as the ranks of a layout; see tests/workers/support/rank_processes.py."""
    from rank_processes import RankProcesses

    processes = RankProcesses()
    yield processes
    processes.close()
