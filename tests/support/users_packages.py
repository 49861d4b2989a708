"""Packages of users that are named like the folders of this repository, which no process of Manta may import."""

from __future__ import annotations

from pathlib import Path

NAMES = ("api", "service", "workers")


def make_packages(folder: Path, record: Path) -> None:
    """Packages in `folder`, each of which leaves its name in the file `record` when it is imported."""
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(
            f"with open({str(record)!r}, 'a') as record: record.write({name!r})\n"
        )
