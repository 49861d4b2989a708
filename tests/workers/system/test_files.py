"""Files: how many may be open, and which are read."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from manta.workers.errors import OpenFilesError
from manta.workers.system.regular_files import open_regular, read_regular
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


def a_socket(path):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.close()


def open_now():
    return len(list(Path("/proc/self/fd").iterdir()))


OTHERS = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("was", ["that from the beginning", "a regular file when it was looked at"])
def test_opening_anything_but_a_regular_file_is_refused_by_its_kind(tmp_path, monkeypatch, kind, was):
    path, regular = tmp_path / "f", (tmp_path / "regular")
    regular.touch()
    OTHERS[kind](path)
    status = regular.stat()
    if was.startswith("a regular") and kind != "a socket":  # which cannot be opened at all
        monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    for read in (open_regular, lambda path: read_regular(path, 10)):
        before = open_now()
        with pytest.raises(OSError, match=re.escape(f"{kind}, not a regular file: '{path}'")):
            read(path)
        assert open_now() == before, "nothing stays open"


def test_opening_a_regular_file_follows_or_refuses_a_link_as_told(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"abc"
    with pytest.raises(OSError, match="a link, not a regular file"):
        open_regular(tmp_path / "link", follow=False)


def test_reading_stops_at_its_limit_whatever_size_the_file_reports(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * (2**20 + 1))
    assert read_regular(path, 2**20 + 1) == path.read_bytes()
    with pytest.raises(OSError, match=r"it has 1048577 bytes or more, and at most 1048576 are read"):
        read_regular(path, 2**20)
    os.truncate(path, 40 * 2**30)
    with pytest.raises(OSError, match=r"it has 42949672960 bytes or more, and at most 10 are read"):
        read_regular(path, 10)
    assert len(read_regular("/proc/self/maps", 2**20)) > 100, "whose size is 0"
    with pytest.raises(OSError, match=r"and at most 10 are read"):
        read_regular("/proc/self/maps", 10)
