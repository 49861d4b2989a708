"""Indexed datasets as Megatron-LM writes them are read as they are, and what is written is what it reads."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from megatron_files import DOCUMENTS, megatron_dataset

from manta.workers.data import indexed_dataset
from manta.workers.data.indexed_dataset import IndexedTokens, boundaries, read_index, tokens_in, write_index
from manta.workers.errors import DataError


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (1, "<u1"), (3, "<i2"), (5, "<i8")])
def test_tokens_of_every_type_are_read_as_one_row(tmp_path, code, kind):
    row = IndexedTokens(megatron_dataset(tmp_path / "a", DOCUMENTS, code, kind))
    assert len(row) == 10
    assert row.read(0, 10).tolist() == list(range(1, 11))
    assert (row.read(4, 3).tolist(), row.read(4, 3).dtype) == ([5, 6, 7], np.int64)
    with pytest.raises(DataError, match=r"a\.bin is cut short: .*, where 11 tokens"):
        IndexedTokens(tmp_path / "a", (kind, 11))
    for start, length in ((-1, 2), (5, 6), (11, 0)):
        with pytest.raises(IndexError):
            row.read(start, length)
    assert row.bounds(2, 5) == (3, 5)
    row.close()


def test_written_index_is_byte_for_byte_that_of_megatron(tmp_path):
    theirs = megatron_dataset(tmp_path / "theirs", DOCUMENTS)
    index = read_index(theirs)
    assert (index.lengths.tolist(), index.documents.tolist()) == ([3, 1, 0, 2, 4], [0, 1, 4, 5])
    ends = [np.array([True, False, False]), np.array([True, True])]
    assert boundaries(ends).tolist() == index.documents.tolist()
    write_index(tmp_path / "ours", "uint16", index.lengths, boundaries(ends))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_open_dataset_stays_readable_after_its_files_are_deleted(tmp_path):
    row = IndexedTokens(megatron_dataset(tmp_path / "a", DOCUMENTS))
    for file in tmp_path.iterdir():
        file.unlink()
    assert row.read(0, 10).tolist() == list(range(1, 11))


def test_reading_tokens_does_not_grow_the_memory_of_the_process(tmp_path):
    np.arange(2**24, dtype="<i4").tofile(tmp_path / "a.bin")  # 64 MiB
    write_index(tmp_path / "a", "<i4", np.array([2**24], np.int32), np.array([0, 1]))
    row, pages = IndexedTokens(tmp_path / "a"), resource.getpagesize()
    before = int(Path("/proc/self/statm").read_text().split()[2]) * pages
    for start in range(0, 2**24, 2**12):
        assert row.read(start, 3).tolist() == [start, start + 1, start + 2]
    assert int(Path("/proc/self/statm").read_text().split()[2]) * pages - before < 16 * 2**20


def test_a_read_that_the_system_cuts_short_is_continued(tmp_path, monkeypatch):
    """As network file systems may do when a signal arrives."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:3]], at))
    row = IndexedTokens(megatron_dataset(tmp_path / "a", DOCUMENTS, 4, "<i4"))
    assert row.read(2, 7).tolist() == [3, 4, 5, 6, 7, 8, 9] and row.bounds(2, 9) == (3, 9)


def test_a_file_that_is_truncated_while_it_is_read_is_bad_data(tmp_path):
    """A process that had mapped it would be killed by a signal."""
    row = IndexedTokens(megatron_dataset(tmp_path / "a", DOCUMENTS))
    os.truncate(tmp_path / "a.bin", 9)
    with pytest.raises(DataError, match=r"a\.bin became shorter while the job was running \(20 bytes at its start\)"):
        row.read(3, 3)


def test_sequences_of_negative_length_are_refused(tmp_path):
    """Though each begins where the one before it ends."""
    np.arange(6, dtype="<i4").tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a", "<i4", np.array([5, -2, 3], np.int32), np.array([0, 3]))
    with pytest.raises(DataError, match=r"a\.idx: sequence 1 does not begin where the one before it ends"):
        tokens_in(tmp_path / "a")


def test_dataset_without_documents_has_length_0(tmp_path):
    assert len(IndexedTokens(megatron_dataset(tmp_path / "a", []))) == 0


def broken(tmp_path, change):
    prefix = megatron_dataset(tmp_path / "a", DOCUMENTS)
    change(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(DataError) as error:
        tokens_in(prefix)
    return str(error.value)


def test_damaged_dataset_is_refused_with_file_and_defect(tmp_path):
    def patch(at, content):
        def change(index, _):
            old = index.read_bytes()
            index.write_bytes(old[:at] + content + old[at + len(content) :])

        return change

    assert "a.idx is not an index of Megatron-LM's" in broken(tmp_path, patch(0, b"TNTIDX\x00\x00\x00"))
    assert "of version 2 with tokens of type 8" in broken(tmp_path, patch(9, b"\x02"))
    assert "of version 1 with tokens of type 7" in broken(tmp_path, patch(17, b"\x07"))
    assert "a.idx is cut short: 5 sequences" in broken(
        tmp_path, lambda index, _: index.write_bytes(index.read_bytes()[:-1])
    )
    assert "sequence 1 does not begin where" in broken(tmp_path, patch(34 + 5 * 4 + 8, b"\x08"))
    assert "a.bin is cut short: 19 bytes, where 10 tokens take 20" in broken(
        tmp_path, lambda _, tokens: tokens.write_bytes(tokens.read_bytes()[:-1])
    )
    assert "a.bin is longer than its index says: 21 bytes" in broken(
        tmp_path, lambda _, tokens: tokens.write_bytes(tokens.read_bytes() + b"x")
    )
    assert "cannot be read" in broken(tmp_path, lambda index, _: index.unlink())
    assert "cannot be read" in broken(tmp_path, lambda _, tokens: tokens.unlink())


def test_index_read_in_parts_has_the_same_checks_and_a_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_BLOCK", 2)
    test_damaged_dataset_is_refused_with_file_and_defect(tmp_path)
    prefix = megatron_dataset(tmp_path / "b", DOCUMENTS)
    index = read_index(prefix)
    assert index.tokens == tokens_in(prefix) == 10
    monkeypatch.setattr(indexed_dataset, "_MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"b\.idx has \d+ bytes, and at most 100 are read: divide the dataset"):
        tokens_in(prefix)
