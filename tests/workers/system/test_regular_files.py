"""Files that others name are read if they are regular, and not beyond a limit."""

import os
import re
import socket
from pathlib import Path

import pytest

from manta.workers.system.regular_files import open_regular, read_regular


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
