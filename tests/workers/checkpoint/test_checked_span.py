"""Pieces of a checked file in memory: what is asked for, read once where it is asked for in order, damage found."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.checkpoint import checksums, stored_rows
from manta.workers.checkpoint.checksums import DamagedCheckpoint, FileSums, SummingFile, checked
from manta.workers.checkpoint.stored_rows import ALIGNMENT, CheckedSpan

BLOCK, SIZE = 64, 1000
CONTENT = bytes(n * 7 % 251 for n in range(SIZE))


def written(path: Path) -> FileSums:
    with patch.object(checksums, "BLOCK_BYTES", BLOCK), SummingFile(io.FileIO(path, "w")) as file:
        file.write(CONTENT)
        return file.sums


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 300)), max_size=12), st.sampled_from([0, 200, 400, 4096])
)
def test_pieces_have_the_files_content_in_any_order(pieces, span):
    with tempfile.TemporaryDirectory() as folder, patch.object(stored_rows, "SPAN_BYTES", span):
        path = Path(folder) / "file"
        with checked(path, written(path)) as file:
            here = CheckedSpan(file)
            for at, length in pieces:
                count = min(length, SIZE - at)
                assert here.piece(at, count).tobytes() == CONTENT[at : at + count]


@pytest.mark.parametrize("step", [10, 64, 100, 230])
def test_pieces_asked_for_in_order_read_each_block_once(step, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "SPAN_BYTES", 4 * BLOCK)
    with checked(tmp_path / "file", written(tmp_path / "file")) as file:
        read: list[int] = []
        once = file.read_block
        monkeypatch.setattr(file, "read_block", lambda number, buffer: (read.append(number), once(number, buffer)))
        here = CheckedSpan(file)
        for at in range(0, SIZE, step):
            here.piece(at, min(step, SIZE - at))
    assert read == list(range(-(-SIZE // BLOCK)))


def test_piece_of_which_nothing_was_in_memory_is_aligned(tmp_path):
    with checked(tmp_path / "file", written(tmp_path / "file")) as file:
        assert CheckedSpan(file).piece(331, 200).ctypes.data % ALIGNMENT == 0


def test_damaged_block_is_reported_on_each_read_and_the_rest_can_be_read(tmp_path):
    sums = written(tmp_path / "file")
    (tmp_path / "file").write_bytes(CONTENT[:200] + b"?" + CONTENT[201:])
    with checked(tmp_path / "file", sums) as file:
        here = CheckedSpan(file)
        for _ in range(2):
            with pytest.raises(DamagedCheckpoint, match="is not what was written, in the 64 bytes from byte 192"):
                here.piece(100, 200)
        assert here.piece(0, 150).tobytes() == CONTENT[:150]
        assert here.piece(300, 100).tobytes() == CONTENT[300:400]


def test_piece_beyond_the_end_of_the_file_is_refused(tmp_path):
    with (
        checked(tmp_path / "file", written(tmp_path / "file")) as file,
        pytest.raises(ValueError, match="no bytes 900"),
    ):
        CheckedSpan(file).piece(900, 101)
