"""The corpus, and the record of what it was when the job began."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.config import DataConfig
from manta.workers.data import corpus_record
from manta.workers.data.corpus_record import as_recorded, as_recorded_tokens
from manta.workers.data.prepare import ByteCorpus
from manta.workers.data.sources import CorpusFile, corpus_files
from manta.workers.errors import DataError
from manta.workers.storage.files import LocalFiles

LENGTH = 10_000


@pytest.fixture
def folder(tmp_path):
    """Three texts, the second of which is empty."""
    made = tmp_path / "texts"
    made.mkdir()
    for name, content in (("a.txt", b"a" * LENGTH), ("b.txt", b""), ("c.txt", b"c" * LENGTH)):
        (made / name).write_bytes(content)
    return made


@pytest.fixture
def record(tmp_path):
    return tmp_path / "job" / "corpus.json"


def opened(folder, record, write=False):
    data = DataConfig(source="text", paths=[str(folder)])
    return ByteCorpus(as_recorded(corpus_files(data), record, write))


def refused(folder, record):
    with pytest.raises(DataError) as error:
        corpus = opened(folder, record)
        corpus.read(0, len(corpus))
    return str(error.value)


def test_unchanged_corpus_reads_the_same_on_restart(folder, record):
    first = opened(folder, record, write=True).read(0, 2 * LENGTH)
    again = opened(folder, record, write=True).read(0, 2 * LENGTH)
    assert first.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "a.txt",
            b"a" * (LENGTH + 1),
            "a.txt has 10001 bytes, and had 10000 when the job began: put it back as it was",
        ),
        ("c.txt", b"c" * 5, "c.txt has 5 bytes, and had 10000 when the job began: put it back as it was"),
        ("a.txt", b"", "a.txt is gone or empty, and was not when the job began: put it back as it was"),
        ("b.txt", b"more", "b.txt was not there when the job began: take it away"),
        ("new.txt", b"more", "new.txt was not there when the job began: take it away"),
        ("c.txt", b"x" * LENGTH, "c.txt is not what it was when the job began: put it back as it was"),
        (
            "c.txt",
            b"c" * 5000 + b"x" + b"c" * 4999,
            "c.txt is not what it was when the job began: put it back as it was",
        ),
        ("c.txt", b"c" * 9999 + b"x", "c.txt is not what it was when the job began: put it back as it was"),
    ],
)
def test_changed_corpus_file_is_named_at_the_next_start(folder, record, name, content, sentence):
    opened(folder, record, write=True)
    (folder / name).write_bytes(content)
    assert f"{folder}/{sentence}" in refused(folder, record)


def test_corpus_file_deleted_after_the_job_began_is_named_in_the_refusal(folder, record):
    opened(folder, record, write=True)
    (folder / "c.txt").unlink()
    assert f"{folder}/c.txt is gone" in refused(folder, record)


def test_file_that_is_replaced_while_the_job_runs_is_named_before_it_is_first_read(folder, record):
    corpus = opened(folder, record, write=True)
    (folder / "c.txt").write_bytes(b"x" * LENGTH)
    assert len(corpus.read(0, LENGTH)) == LENGTH, "nothing of it is read yet"
    with pytest.raises(DataError, match=r"c\.txt is not what it was"):
        corpus.read(LENGTH, 1)


def test_corpus_file_overwritten_in_place_is_refused_and_one_that_grows_is_not(folder, record):
    corpus = opened(folder, record, write=True)
    first = corpus.read(0, LENGTH)
    with (folder / "a.txt").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"more")
        file.flush()
        assert corpus.read(0, LENGTH).tolist() == first.tolist()
        file.seek(LENGTH // 2)
        file.write(b"x")
    os.utime(folder / "a.txt", ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.txt is not what it was when the job began"):
        corpus.read(0, 1)


def test_refused_corpus_file_does_not_stay_open(folder, record):
    corpus = opened(folder, record, write=True)
    (folder / "a.txt").write_bytes(b"x" * LENGTH)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(DataError, match=r"a\.txt is not what it was"):
            corpus.read(0, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_short_file_that_grows_during_the_job_is_read_up_to_its_first_length(folder, record):
    """Its end is not looked at before the next start, which then names it."""
    (folder / "a.txt").write_bytes(b"short")
    files = corpus_files(DataConfig(source="text", paths=[str(folder)]))
    for _ in range(2):
        with (folder / "a.txt").open("ab") as file:
            file.write(b"er")
        corpus = ByteCorpus(as_recorded(files, record, True))
        assert bytes(corpus.read(0, 6).tolist()) == b"shortc"
    assert "a.txt has 9 bytes, and had 5" in refused(folder, record)


def test_partly_written_corpus_record_is_replaced_at_the_next_start(folder, record, monkeypatch):
    write = Path.write_text

    def fill_the_disk(path, text):
        write(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill_the_disk)
        opened(folder, record, write=True)
    opened(folder, record, write=True)
    (folder / "a.txt").write_bytes(b"other")
    assert "a.txt has 5 bytes, and had 10000" in refused(folder, record)


def test_corpus_record_is_written_only_by_the_recording_rank_and_never_again(folder, record):
    opened(folder, record)
    assert not record.exists()
    opened(folder, record, write=True)
    made = record.read_bytes()
    (folder / "a.txt").write_bytes(b"longer" * LENGTH)
    refused(folder, record)
    with pytest.raises(DataError):
        opened(folder, record, write=True)
    assert record.read_bytes() == made


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": [{"path": 1}]}', b'{"files": [{"unknown": 1}]}'])
def test_unreadable_corpus_record_is_logged_and_training_starts(folder, record, content, caplog):
    record.parent.mkdir()
    record.write_bytes(content)
    assert len(opened(folder, record, write=True)) == 2 * LENGTH
    assert f"{record} makes no sense" in caplog.text


def test_training_starts_though_the_corpus_record_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    corpus = opened(folder, tmp_path / "file" / "corpus.json", write=True)
    assert len(corpus) == 2 * LENGTH
    os.truncate(folder / "a.txt", LENGTH)
    assert len(corpus.read(0, LENGTH)) == LENGTH


def test_training_starts_though_the_records_file_system_does_not_answer(folder, record, monkeypatch):
    """A rank that replaces another reads the record too, and all others wait for it."""
    opened(folder, record, write=True)
    answers = threading.Event()
    monkeypatch.setattr(corpus_record, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(LocalFiles, "read", lambda self, file: answers.wait(60) and b"")
    try:
        assert len(opened(folder, record, write=True)) == 2 * LENGTH
        assert not as_recorded_tokens({"the tokenizer": "digest"}, record, write=True)
    finally:
        answers.set()


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
