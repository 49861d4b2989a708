"""Revisions of the job database's schema, without the database's library, which takes longer to import than most
commands take to run."""

from __future__ import annotations

from pathlib import Path

MIGRATIONS = Path(__file__).parent / "store" / "migrations"


def newest_revision() -> str:
    """Of the schema that this version works with."""
    return max(all_revisions())


def all_revisions() -> list[str]:
    """Revisions of releases, which the file names of migrations begin with."""
    return [path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")]
