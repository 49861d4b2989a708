"""Where things lie in a snapshot file, and which files are none of ours."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from itertools import pairwise
from unittest.mock import Mock

import pytest

from manta.workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint
from manta.workers.errors import CheckpointError
from manta.workers.snapshot import snapshot_file
from manta.workers.snapshot.snapshot_file import NOTE_BYTES, SLOTS, Form, SnapshotFile, committed_steps

IDENTITY = b"0123456789abcdef"


@pytest.mark.parametrize("payload", [1, 4096 - 8, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES])
@pytest.mark.parametrize("table", [b"{}", b"x" * 5000])
def test_parts_of_a_snapshot_file_do_not_overlap(payload, table):
    form = Form(IDENTITY, payload, table)
    assert form.blocks == -(-payload // BLOCK_BYTES) + 1, "the last one is of the note"
    places = [(0, len(form.head)), (128, 128 + 8 * SLOTS), (256, 256 + 16 * SLOTS), (4096, 4096 + len(table))]
    for slot in range(SLOTS):
        places.append((form.payload_at(slot), form.payload_at(slot) + payload))
        places.append((form.note_at(slot), form.note_at(slot) + 8 + NOTE_BYTES))
        places.append((form.sums_at(slot), form.sums_at(slot) + 4 * form.blocks))
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert places[-1][1] <= form.size
    assert form.payload_at(0) % 4096 == form.payload_at(1) % 4096 == 0, "the state is mapped by pages"


def test_snapshot_file_of_another_format_is_refused_with_its_format_number(tmp_path):
    path, form = tmp_path / "file", Form(IDENTITY, 100)
    SnapshotFile.create(path, form).close()
    assert SnapshotFile.open(path).form == form
    head = bytearray(form.head[:-4])
    head[8:12] = struct.pack("<I", 9)
    with path.open("r+b") as file:
        file.write(bytes(head) + struct.pack("<I", zlib.crc32(head)))
    with pytest.raises(CheckpointError, match="has format 9 of snapshots, this program reads 2"):
        SnapshotFile.open(path)
    assert committed_steps(path) == []
    head[0] ^= 1
    with path.open("r+b") as file:
        file.write(bytes(head) + struct.pack("<I", zlib.crc32(head)))
    with pytest.raises(DamagedCheckpoint, match="are not what was written"):
        SnapshotFile.open(path)


def test_slot_without_a_valid_marker_has_no_step_and_is_written_first(tmp_path):
    file = SnapshotFile.create(tmp_path / "file", Form(IDENTITY, 100))
    assert [file.step(slot) for slot in range(SLOTS)] == [None, None]
    struct.pack_into("<Q", file.memory, 128, 7)
    assert file.step(0) is None
    file.commit(0, 6)
    file.commit(1, 0)
    assert committed_steps(tmp_path / "file") == [0, 6]
    assert file.oldest() == 1
    file.begin(0)
    assert file.oldest() == 0, "an empty one costs nothing"
    file.commit(0, 0)
    file.begin(1)
    assert file.oldest() == 1, "nor where the other one is the start"
    file.close()


def test_snapshot_file_opened_for_reading_cannot_be_changed(tmp_path):
    SnapshotFile.create(tmp_path / "file", Form(IDENTITY, 100)).close()
    file = SnapshotFile.open(tmp_path / "file")
    with pytest.raises(TypeError, match="read-write"):
        file.begin(0)
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_snapshot_file_that_cannot_be_allocated_is_closed_and_removed(tmp_path, monkeypatch, number):
    closed, close = [], os.close
    monkeypatch.setattr(snapshot_file.os, "posix_fallocate", Mock(side_effect=OSError(number, os.strerror(number))))
    monkeypatch.setattr(snapshot_file.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    with pytest.raises(Exception, match="no room" if number == errno.ENOSPC else "Input/output error"):
        SnapshotFile.create(tmp_path / "file", Form(IDENTITY, 100))
    assert len(closed) == 1 and list(tmp_path.iterdir()) == []
