"""What the packages import is what `pyproject.toml` declares, so that no release of another package takes it away."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "manta"
IMPORT = re.compile(r"^ *(?:import (\w+)(?:[\w.]*)(?: as \w+)?$|from (\w+)[\w.]* import )", re.MULTILINE)
DISTRIBUTIONS = {
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "re2": "google-re2",
    "yaml": "pyyaml",
}
"""By module, where the names differ."""
OF_USERS = {"lm_eval"}
"""What users install who have a use for it."""
FOR_TYPES = {"_typeshed"}


def imported() -> set[str]:
    """Modules, in functions too."""
    texts = (path.read_text() for room in HOUSE.iterdir() for path in room.rglob("*.py"))
    found = (name or other for text in texts for name, other in IMPORT.findall(text))
    return set(found) - sys.stdlib_module_names - {"manta", *OF_USERS, *FOR_TYPES}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in extras[extra] if extra != "dev")]
    return {re.match(r"[\w-]+", each)[0].lower() for each in wanted}


def test_what_is_imported_is_declared():
    distributions = {DISTRIBUTIONS.get(name, name.replace("_", "-").lower()) for name in imported()}
    assert {"torch", "fastapi", "pyarrow"} <= distributions
    assert distributions - declared() == set()
