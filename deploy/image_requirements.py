"""Prints what pyproject.toml says the package needs, one requirement a line, for the images: without what is named.

python image_requirements.py --extra s3 --without torch
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str], without: list[str]) -> list[str]:
    """Of the package and its `extras`, but for the distributions named in `without`."""
    project = tomllib.loads(pyproject)["project"]
    everything = [
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ]
    return [each for each in everything if name_of(each) not in without]


def name_of(requirement: str) -> str:
    """The distribution that a requirement is about."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--pyproject", type=Path, default=Path("pyproject.toml"))
    options = parser.parse_args()
    print("\n".join(requirements(options.pyproject.read_text(encoding="utf-8"), options.extra, options.without)))


if __name__ == "__main__":
    main()
