"""A corpus reads like its files end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.data.prepare import ByteCorpus
from manta.workers.data.sources import CorpusFile
from manta.workers.errors import DataError

PARTS = [b"first, ", b"s", "zweite Zeile: \u00e4\n".encode(), bytes(range(256)), b"last"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> ByteCorpus:
    """Five files."""
    folder = tmp_path_factory.mktemp("corpus")
    files = []
    for number, part in enumerate(PARTS):
        path = folder / f"{number}.txt"
        path.write_bytes(part)
        files.append(CorpusFile(str(path), len(part)))
    return ByteCorpus(files)


@given(st.data())
def test_reading_across_files_equals_reading_their_concatenation(corpus, data):
    whole = b"".join(PARTS)
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert corpus.read(start, length).tolist() == list(whole[start : start + length])


def test_corpus_length_is_the_sum_of_its_files(corpus):
    assert len(corpus) == sum(len(part) for part in PARTS)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 1000), (len(b"".join(PARTS)), 1)])
def test_read_outside_the_corpus_is_an_index_error(corpus, start, length):
    with pytest.raises(IndexError, match="of a corpus of"):
        corpus.read(start, length)


def one_file(path: Path) -> ByteCorpus:
    """A corpus of one file that is there."""
    path.write_bytes(b"x" * 100)
    return ByteCorpus([CorpusFile(str(path), 100)])


def test_corpus_file_that_shrinks_after_opening_is_named_in_the_error(tmp_path):
    corpus = one_file(tmp_path / "shrinks.txt")
    corpus.read(0, 100)
    (tmp_path / "shrinks.txt").write_bytes(b"x" * 50)
    with pytest.raises(DataError, match=rf"{tmp_path}/shrinks.txt became shorter .*100 bytes at its start"):
        corpus.read(0, 50)


def test_corpus_file_deleted_before_its_first_read_is_named_in_the_error(tmp_path):
    corpus = one_file(tmp_path / "gone.txt")
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(DataError, match=f"cannot be read: {tmp_path}/gone.txt"):
        corpus.read(0, 1)


def test_corpus_of_many_files_keeps_few_of_them_open_at_once(tmp_path):
    files = []
    for number in range(600):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(bytes([number % 256]))
        files.append(CorpusFile(str(path), 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    corpus = ByteCorpus(files)
    assert corpus.read(0, 600).tolist() == [number % 256 for number in range(600)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 300
    corpus.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert corpus.read(599, 1).tolist() == [599 % 256], "and may be opened again"
    corpus.close()
