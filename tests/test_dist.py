"""What `make dist` makes is all that a machine needs: the wheel is installed into an environment of its own, and runs a
job there. And the numbers by which releases go agree."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.users_packages import make_packages

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
ROOMS = ("api", "service", "workers")
SECONDS = 1800.0


def run(*words: str | Path, **options) -> str:
    """What a program that succeeds has printed."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=SECONDS, **options)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the sdist, as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert (folder / f"manta_train-{VERSION}.tar.gz").is_file()
    return folder / f"manta_train-{VERSION}-py3-none-any.whl"


def environment(folder: Path, wheel: Path, from_nothing: bool) -> Path:
    """A virtual environment with the wheel in it: its `bin`. `from_nothing`: pip fetches all that the wheel needs, in
    the versions of the lock; else that is what these tests run with."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    if from_nothing:
        run(*pip, "--constraint", ROOT / "requirements.lock", wheel)
        return python.parent
    run(*pip, "--no-deps", "--no-index", wheel)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


def test_the_wheel_holds_the_service_and_nothing_that_needs_a_checkout(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "manta", f"manta_train-{VERSION}.dist-info",
    }  # fmt: skip
    sources = {
        str(path.relative_to(ROOT / "src")) for room in ROOMS for path in (ROOT / "src" / "manta" / room).rglob("*.py")
    }
    held = {name for name in names if name.endswith(".py")}
    assert sources - held == {name for name in sources if name.startswith("manta/api/demo/")}
    assert {"manta/__init__.py", "manta/api/ui/static/style.css", "manta/api/ui/static/pages/job/ranks.js"} <= set(
        names
    )


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("from_nothing", [False, True])
def test_an_installed_wheel_runs_a_job(wheel, tmp_path, from_nothing):
    programs = environment(tmp_path / "environment", wheel, from_nothing)
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    job = {
        "model": {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 16},
        "data": {"source": "text", "paths": ["words.txt"]},
        "train": {"steps": 5, "global_batch_size": 8},
        "parallel": {"data": 2},
        "resources": {"accelerator": "cpu"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MANTA", "VIRTUAL"))}
    options = {"cwd": tmp_path, "env": {**kept, "MANTA_HOME": str(tmp_path / "home")}}
    manta, imported = programs / "manta", tmp_path / "imported"
    make_packages(tmp_path, imported)
    make_packages(next((tmp_path / "environment" / "lib").glob("python*/site-packages")), imported)
    assert run(manta, "--version", **options).startswith(f"manta {VERSION} ")
    where = run(programs / "python", "-c", "import manta; print(manta.__file__)", **options)
    assert Path(where).is_relative_to(tmp_path / "environment")
    try:
        run(manta, "up", "--port", "0", "--slots", "2", **options)
        assert "SUCCEEDED" in run(manta, "submit", "job.yaml", "--follow", **options)
        single = {**job, "parallel": {}, "data": {"source": "text", "paths": [str(tmp_path / "words.txt")]}}
        (tmp_path / "single.yaml").write_text(yaml.safe_dump(single))
        run(manta, "run", "single.yaml", **options)
        run(programs / "python", "-m", "manta.workers.run", "single.yaml", **options)
        assert not imported.exists(), "packages of the user, beside Manta and where the command runs"
    finally:
        run(manta, "down", **options)


def test_the_changelog_begins_with_this_release_and_has_all_before():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [line.split()[0] for line in (ROOT / "releases.txt").read_text().splitlines()]
    assert headings == [VERSION.partition(".dev")[0], *reversed(released)]
