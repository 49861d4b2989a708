"""Files that are summed while they are written and checked while they are read, block by block."""

from __future__ import annotations

import errno
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.checkpoint import checksums
from manta.workers.checkpoint.checksums import (
    CheckedFile,
    DamagedCheckpoint,
    FileSums,
    SummingFile,
    UnreadableCheckpoint,
    Window,
    checked,
)
from manta.workers.errors import CheckpointError

BLOCK = 16
contents = st.binary(max_size=5 * BLOCK)
cuts = st.lists(st.integers(1, 3 * BLOCK), max_size=12)


@contextmanager
def written(content: bytes, sizes: list[int]) -> Iterator[tuple[Path, FileSums]]:
    """A file of small blocks that was written in pieces of `sizes`, and its sums."""
    with tempfile.TemporaryDirectory() as folder, patch.object(checksums, "BLOCK_BYTES", BLOCK):
        path = Path(folder) / "data"
        raw = SummingFile(io.FileIO(path, "w"))
        with io.BufferedWriter(raw, buffer_size=7) as file:
            for size in sizes:
                file.write(content[file.tell() : file.tell() + size])
            file.write(content[file.tell() :])
        yield path, raw.sums


@settings(deadline=None)
@given(contents, cuts)
def test_checksums_of_a_file_do_not_depend_on_the_sizes_of_its_writes(content, sizes):
    with written(content, sizes) as (path, sums):
        assert path.read_bytes() == content
        blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
        assert sums == FileSums(len(content), tuple(zlib.crc32(block) for block in blocks), BLOCK)


class ShortWrites(io.FileIO):
    """Takes five bytes at a time, as a disk that is nearly full may."""

    def write(self, data, /):
        return super().write(memoryview(data)[:5])


def test_sums_cover_only_the_bytes_that_a_short_write_took(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    content = bytes(range(40))
    with SummingFile(ShortWrites(tmp_path / "data", "w")) as raw:
        assert raw.write(content) == 5
        assert raw.sums == FileSums(5, (zlib.crc32(content[:5]),), BLOCK)
        with io.BufferedWriter(raw) as file:
            file.write(content[5:])
    blocks = [content[start : start + BLOCK] for start in range(0, 40, BLOCK)]
    assert raw.sums == FileSums(40, tuple(zlib.crc32(block) for block in blocks), BLOCK)


@settings(deadline=None)
@given(contents, st.lists(st.tuples(st.integers(0, 6 * BLOCK), st.integers(0, 3 * BLOCK)), max_size=12), st.booleans())
def test_checked_file_reads_the_right_bytes_at_any_position(content, reads, with_sums):
    with written(content, []) as (path, sums):
        known = sums if with_sums else FileSums(sums.size, None, BLOCK)
        with checked(path, known) as file:
            file.check()
            for start, length in reads:
                assert file.seek(start) == start
                assert file.read(length) == content[start : start + length]
                assert file.tell() == start + len(content[start : start + length])
            assert file.seek(0, io.SEEK_END) == len(content)
            assert file.seek(-len(content), io.SEEK_CUR) == 0
            with pytest.raises(ValueError, match="no byte -1"):
                file.seek(-1)
            assert file.read() == content


@settings(deadline=None)
@given(contents.filter(len), st.data())
def test_block_with_a_changed_byte_is_reported_as_damaged_and_never_read(content, data):
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    first = at // BLOCK * BLOCK
    length = min(BLOCK, len(content) - first)
    with written(content, []) as (path, sums):
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        expected = f"is damaged: data is not what was written, in the {length} bytes from byte {first}$"
        with checked(path, sums) as file:
            with pytest.raises(DamagedCheckpoint, match=expected):
                file.check()
            for start in range(len(content)):
                file.seek(start)
                if start // BLOCK == at // BLOCK:
                    with pytest.raises(DamagedCheckpoint, match=expected):
                        file.read(1)
                else:
                    assert file.read(1) == content[start : start + 1]


@settings(deadline=None)
@given(contents, contents)
def test_file_of_another_size_is_reported_before_it_is_read(content, other):
    with written(content, []) as (path, sums):
        path.write_bytes(other)
        if len(other) == len(content):
            return
        what = "is cut off at" if len(other) < len(content) else "continues to"
        expected = f"data {what} byte {len(other)}: it should have {len(content)} bytes"
        with pytest.raises(DamagedCheckpoint, match=expected), checked(path, sums):
            pass


def test_checked_file_that_does_not_exist_is_reported_missing(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DamagedCheckpoint, match=f"{path.name} is missing$"), checked(path, FileSums(1, None, 1)):
            pass


def test_file_whose_folder_is_gone_is_unreadable_and_not_damaged(tmp_path):
    path, what = tmp_path / "none" / "data", f"the checkpoint at {tmp_path}/none cannot be read: it is not there"
    with pytest.raises(UnreadableCheckpoint, match=what), checked(path, FileSums(1, None, 1)):
        pass


class FailingDisk:
    """Stands for a file whose medium fails, or that shrinks while it is read."""

    def __init__(self, number: int | None):
        self.number = number

    def read_into(self, buffer: memoryview, at: int) -> int:
        if self.number is None:
            return len(buffer) // 2
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "kind", "what"), [
    (errno.EIO, UnreadableCheckpoint, "cannot be read: data from byte 16: Input/output error"),
    (errno.EACCES, UnreadableCheckpoint, "cannot be read: data from byte 16: Permission denied"),
    (None, DamagedCheckpoint, "data is cut off at byte 20: it should have 24 bytes"),
])  # fmt: skip
def test_read_error_is_reported_with_the_file_and_told_from_a_short_file(number, kind, what):
    file = CheckedFile(Path("/folder/data"), FailingDisk(number), FileSums(24, (1, 2), BLOCK))
    file.seek(20)
    with pytest.raises(CheckpointError, match=f"^the checkpoint at /folder (is damaged: )?{what}$") as caught:
        file.read(1)
    assert type(caught.value) is kind


@settings(deadline=None)
@given(contents, st.data())
def test_window_of_a_file_reads_like_a_file_with_only_its_bytes(content, data):
    start = data.draw(st.integers(0, len(content)))
    size = data.draw(st.integers(0, len(content) - start))
    seeks = st.tuples(st.just("seek"), st.integers(0, size + 3), st.sampled_from([io.SEEK_SET, io.SEEK_CUR]))
    reads = st.tuples(st.sampled_from(["read", "readinto"]), st.sampled_from([None, -1, 0, 1, 3, BLOCK, 99]))
    with written(content, []) as (path, sums), checked(path, sums) as file:
        window, expected = Window(file, start, size), io.BytesIO(content[start : start + size])
        assert window.readable() and window.seekable()
        for name, *arguments in data.draw(st.lists(seeks | reads, max_size=8)):
            file.seek(len(content) // 2)  # somebody else reads the same file
            if name == "readinto":
                buffers = [bytearray(max(0, arguments[0] or 0)) for _ in range(2)]
                assert window.readinto(buffers[0]) == expected.readinto(buffers[1])
                assert buffers[0] == buffers[1]
            else:
                assert getattr(window, name)(*arguments) == getattr(expected, name)(*arguments)
            assert window.tell() == expected.tell()
        assert window.seek(-size, io.SEEK_END) == 0
        assert window.read() == expected.getvalue()
        with pytest.raises(ValueError, match="there is no byte -1"):
            window.seek(-1)


def test_two_most_recently_used_blocks_are_not_read_again(tmp_path, monkeypatch):
    """Readers of archives go back and forth; each further reading of 4 MiB would cost them its time."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 4)
    with SummingFile(io.FileIO(tmp_path / "file", "w")) as file:
        file.write(b"0123456789ab")
    read: list[int] = []
    with checked(tmp_path / "file", file.sums) as file:
        once = file.read_block
        monkeypatch.setattr(file, "read_block", lambda number, buffer: (read.append(number), once(number, buffer)))

        def byte_of(block: int) -> bytes:
            file.seek(4 * block)
            return file.read(1)

        assert [byte_of(block) for block in (0, 1, 0, 1, 1, 0)] == [b"0", b"4", b"0", b"4", b"4", b"0"]
        assert read == [0, 1]
        assert [byte_of(block) for block in (2, 0, 2, 1)] == [b"8", b"0", b"8", b"4"]
        assert read == [0, 1, 2, 1], "what was not needed for longest made room"


def test_blocks_needed_only_in_part_are_fetched_ahead_whole():
    """Each once, of the last one as much as there is."""
    expected: list[tuple[int, int]] = []
    stream = SimpleNamespace(expect=expected.extend)
    file = CheckedFile(Path("data"), stream, FileSums(25, None, 10))  # type: ignore[arg-type]
    file.expect([(3, 4), (8, 4), (20, 5)])
    assert expected == [(0, 10), (10, 10), (20, 5)]
