"""Below which folders jobs of a service may read their data."""

from __future__ import annotations

from pathlib import Path

from workers.data.roots import DataRoots

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


def roots_of(folders: tuple[Path, ...] | None, host: str) -> DataRoots:
    """`folders` as configured. If they are not: everything for a service that listens on loopback, nothing for one that
    listens elsewhere (`host`)."""
    return DataRoots(folders if folders is not None or host in LOOPBACK_HOSTS else ())
