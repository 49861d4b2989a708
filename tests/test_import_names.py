"""The only name that Manta takes in a Python is `manta`: nothing imports, or starts, what is named otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import manta

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "src/manta/api", "src/manta/service", "src/manta/workers",
    "benchmarks", "deploy", "docs", "examples", "helm", "tests",
)  # fmt: skip
ENDINGS = {".py", ".md", ".toml", ".yml", ".yaml", ".tpl", ".sh", ""}
NAMED = re.compile(r"(?<![\w./-])manta\.(?:api|service|workers)(?:\.[A-Za-z_]\w*)+")
WITHOUT_MANTA = re.compile(
    r"(?:\bfrom|^ *import|['\"]import|-m[\"', ]+) ?(?:api|service|workers)(?:\.\w|\s+import\b)", re.MULTILINE
)
OF_OTHERS = ("test_upgrade.py", "test_import_names.py", "results/")
"""Files that name modules of 0.2.0, or none on purpose; and figures of the past."""


def files() -> list[Path]:
    here = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".yml"} or path.name == "Makefile"]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [path for path in (*here, *below) if path.is_file() and path.suffix in ENDINGS]
    return [path for path in found if path.name != "CHANGELOG.md" and not any(each in str(path) for each in OF_OTHERS)]


def resolves(name: str) -> bool:
    """Whether it is a module, or what a module has, or what an object of a module has."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if is_module(".".join(parts[:end])):
            break
    rest = parts[end:]
    if not rest:
        return True
    try:
        found = importlib.import_module(".".join(parts[:end]))
    except ImportError:  # of a library that is not installed
        return True
    return hasattr(found, rest[0])


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_modules_that_code_texts_and_manifests_name_exist():
    named = {name: path for path in files() for name in NAMED.findall(path.read_text())}
    assert len(named) > 500
    assert {name: str(path) for name, path in named.items() if not resolves(name)} == {}


def test_names_that_texts_and_manifests_import_exist():
    texts = [path.read_text() for path in files() if path.suffix != ".py"]
    found = {each for text in texts for each in re.findall(r"from (manta[\w.]*) import (\w+)", text)}
    found = {(module, name) for module, name in found if "lm_evaluation" not in module}  # its library is not installed
    assert found
    assert {each for each in found if not hasattr(importlib.import_module(each[0]), each[1])} == set()


def test_nothing_imports_or_starts_a_module_outside_of_manta():
    found = {f"{path}: {match}" for path in files() for match in WITHOUT_MANTA.findall(path.read_text())}
    assert found == set()
    assert {"api", "service", "workers"}.isdisjoint(sys.modules)


def test_names_for_programs_are_offered_and_loaded_at_their_first_use():
    program = "import manta, sys; print({*sys.modules} & {'ray', 'torch', 'httpx', 'manta.api', 'manta.workers'}); "
    program += "[getattr(manta, name) for name in manta._PLACES]"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr


def test_name_that_manta_does_not_offer_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        manta.Clint  # noqa: B018
    assert set(dir(manta)) >= set(manta._PLACES)
