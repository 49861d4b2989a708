"""Process groups under another torch than the locked one: from 2.14 on they last, and take new members."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = [f"tests/workers/comm/{name}.py" for name in ("test_process_groups", "test_repair", "test_repair_self_test")]
WAY = """
import sys, torch
from manta.workers.comm.regroup import regroup_for
print([int(part) for part in torch.__version__.split(".")[:2]] >= [2, 14], regroup_for(torch.device("cpu"), True).way)
"""


@pytest.fixture
def other(request) -> str:
    """The Python that has it."""
    python = request.config.getoption("--other-torch")
    if python is None:
        pytest.skip("no Python with another torch was named")
    return str(python)


def run(*command: str) -> str:
    """What it prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_process_groups_are_repaired_in_place_with_another_torch(other):
    is_new, way = run(other, "-c", WAY).split(maxsplit=1)
    assert way.strip() == ("reconfigure" if is_new == "True" else "abort and new groups")
    for options in ([], ["--soak"]):
        wanted = ["-p", "no:cacheprovider", "-k", "process_groups or self_test", *options]
        assert run(other, "-m", "pytest", "-rA", *wanted, *FILES).count("PASSED tests/") > 5
