"""The limit of open files is raised as far as is needed and allowed; where that is too little, a sentence says so."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from manta.workers.errors import OpenFilesError
from manta.workers.system.resources import RESERVED_FILES, raise_limit, reserve_files

ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(("soft", "hard", "raised", "allowed"), [
    (1024, 100_000, 5000, 5000),
    (1024, 4096, 4096, 4096),
    (1024, ANY, 5000, 5000),
    (9000, 9000, None, 5000),
    (ANY, ANY, None, 5000),
    (100, 100, None, 100),
])  # fmt: skip
def test_open_file_limit_is_raised_as_far_as_needed_and_allowed(monkeypatch, soft, hard, raised, allowed):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert raise_limit(5000) == allowed
    assert asked == ([] if raised is None else [(raised, hard)])


def test_too_few_are_reported_with_the_number_that_would_do(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    reserve_files(1024 - RESERVED_FILES)
    with pytest.raises(OpenFilesError, match=r"3071 connections .* take 3327 .* may have 1024: .*`ulimit -n 3327`"):
        reserve_files(3071)


def test_process_with_a_low_file_limit_can_raise_it_enough():
    program = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from manta.workers.system.resources import reserve_files
reserve_files(200)
print(len([os.dup(0) for _ in range(400)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "400\n", done.stderr
