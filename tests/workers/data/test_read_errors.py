"""A disk or mount that does not work says nothing about the files of a corpus: they are unreadable now, and not bad."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
from engine_specs import spec
from megatron_files import DOCUMENTS, megatron_dataset
from storage_away import away
from tokenizer_files import byte_level

from manta.workers.config import DataConfig
from manta.workers.data import token_cache, token_process, trained_tokenizer
from manta.workers.data.chat_template import open_template
from manta.workers.data.corpus_record import with_digests
from manta.workers.data.documents import raw_pieces_of, texts_of
from manta.workers.data.indexed_dataset import IndexedTokens
from manta.workers.data.prepare import ByteCorpus, open_corpus
from manta.workers.data.read_errors import read_error
from manta.workers.data.roots import ANYWHERE
from manta.workers.data.shards import Section, shards_of
from manta.workers.data.sources import CorpusFile, corpus_files
from manta.workers.data.token_cache import Watcher
from manta.workers.data.token_process import tokenize_shards
from manta.workers.data.tokenizer import ByteTokenizer, file_tokenizer, open_tokenizer
from manta.workers.errors import DataError, DataNotStored, DataUnreadable
from manta.workers.spec.problems import SpecError
from manta.workers.spec.submitted import with_vocabulary

OF_THE_STORAGE = [
    errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV
]  # fmt: skip
OF_THE_FILE = [errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG]
BROKEN = "/proc/self/mem"
"""A regular file whose first bytes nobody can read: the system answers with EIO, as for a bad disk."""


KINDS = ("a pipe", "a device", "40 GB")


def sparse(path):
    path.touch()
    os.truncate(path, 40 * 2**30)


@pytest.fixture
def file(tmp_path) -> Path:
    """A file of a corpus."""
    path = tmp_path / "mount" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a line"}\n' * 40)
    return path


@pytest.mark.parametrize("number", OF_THE_STORAGE)
def test_storage_error_makes_data_unreadable_and_names_file_host_and_remedy(number):
    error = read_error("/mount/a.txt", OSError(number, os.strerror(number)), "not a corpus")
    assert isinstance(error, DataUnreadable)
    assert str(error) == (
        f"/mount/a.txt cannot be read on {socket.gethostname()} now ({os.strerror(number)}): "
        "its disk or mount has to work again there"
    )


@pytest.mark.parametrize("number", OF_THE_FILE)
def test_error_of_the_file_itself_is_bad_data_and_not_unreadable(number):
    error = OSError(number, os.strerror(number))
    assert type(read_error("/a.txt", error)) is DataError
    assert str(read_error("/a.txt", error)) == f"cannot be read: /a.txt ({os.strerror(number)})"
    assert str(read_error("/a.txt", error, "no tokenizer")) == "no tokenizer"


def jsonl(*paths: Path) -> DataConfig:
    return DataConfig(source="jsonl", paths=tuple(map(str, paths)), tokenizer="bpe")


READINGS: dict[str, Callable[[Path], object]] = {
    "files": lambda file: corpus_files(jsonl(file)),
    "files of a folder": lambda file: corpus_files(jsonl(file.parent)),
    "beginnings": lambda file: with_digests([CorpusFile(str(file), 9)]),
    "bytes": lambda file: ByteCorpus([CorpusFile(str(file), 9)]).read(0, 1),
    "tokens": lambda file: IndexedTokens(file),
    "known tokens": lambda file: IndexedTokens(file, ("uint16", 4)),
    "description": lambda file: token_cache.describe([CorpusFile(str(file), 9)], jsonl(file), ByteTokenizer()),
    "tokenizer": lambda file: file_tokenizer(jsonl(file), file),
    "tokenizer that is named": lambda file: open_tokenizer(DataConfig(source="text", tokenizer=str(file))),
    "chat template": lambda file: open_template(DataConfig(source="chat", tokenizer=str(file))),
    "cuts": lambda file: shards_of([CorpusFile(str(file), 2**40)], jsonl(file), cuts_are_exact=True),
    "pieces": lambda file: list(raw_pieces_of(Section(str(file), 0, 9, 9))),
    "lines": lambda file: list(texts_of(Section(str(file), 0, 9, 9), jsonl(file), True)),
    "lines before": lambda file: list(texts_of(Section(str(file), 5, 9, 9), jsonl(file), True)),
    "corpus": lambda file: open_corpus(spec(data={"source": "text", "paths": [str(file)]})),
}


@pytest.mark.parametrize("what", READINGS)
def test_every_reader_of_a_corpus_finds_it_unreadable_while_its_mount_is_away(file, what):
    with away(file.parent), pytest.raises(DataUnreadable, match=rf"^{file.parent}.* cannot be read on .* now"):
        READINGS[what](file)


@pytest.mark.parametrize("what", READINGS)
def test_deleted_corpus_file_is_bad_data_and_not_unreadable_data(file, what):
    file.unlink()
    file.parent.rmdir()
    with pytest.raises(DataError) as caught:
        READINGS[what](file)
    assert not isinstance(caught.value, DataUnreadable)


def test_a_corpus_that_goes_away_between_two_reads_is_unreadable(file, monkeypatch):
    corpus = ByteCorpus([CorpusFile(str(file), file.stat().st_size)])
    corpus.read(0, 9)
    with monkeypatch.context() as patched, pytest.raises(DataUnreadable, match=f"^{file} .*Stale file handle"):
        patched.setattr(os, "preadv", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        corpus.read(0, 9)
    assert len(corpus.read(0, 9)) == 9, "and is the same as before once it is back"
    corpus.close()


def test_tokens_that_go_away_between_two_reads_are_unreadable(tmp_path, monkeypatch):
    row = IndexedTokens(megatron_dataset(tmp_path / "a", DOCUMENTS))
    for reading in (lambda: row.read(0, 9), lambda: row.bounds(0, 9)):
        with monkeypatch.context() as patched, pytest.raises(DataUnreadable, match=r"a\.bin .*Input/output error"):
            patched.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
            reading()
    assert len(row.read(0, 9)) == 9, "and are the same as before once they are back"
    row.close()


def test_mount_that_disconnects_during_the_check_is_not_taken_for_missing_permission(file, monkeypatch):
    stat = Path.stat

    def twice(path: Path, **more: Any) -> os.stat_result:
        if len(asked) == 1 and path == file:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return stat(path, **more)

    asked: list[object] = []
    monkeypatch.setattr(os, "access", lambda *_: bool(asked.append(1)))
    monkeypatch.setattr(Path, "stat", twice)
    with pytest.raises(DataUnreadable, match="Transport endpoint is not connected"):
        corpus_files(jsonl(file))


def test_parquet_file_is_unreadable_on_a_disk_error_and_bad_data_if_malformed(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_text("not parquet")
    config = DataConfig(source="parquet", paths=(str(path),))
    section = Section(str(path), 0, -1, 9)
    with pytest.raises(DataError, match="is not a parquet file") as caught:
        list(texts_of(section, config, True))
    assert not isinstance(caught.value, DataUnreadable)
    monkeypatch.setattr(
        pyarrow.parquet,
        "ParquetFile",
        Mock(side_effect=OSError(errno.EIO, "Error reading bytes from file. Detail: [errno 5] Input/output error")),
    )
    with pytest.raises(DataUnreadable, match=rf"^{path} .*Input/output error"):
        list(texts_of(section, config, True))


def test_tokenizing_process_passes_on_a_storage_error(tmp_path):
    config = DataConfig(source="jsonl", paths=(BROKEN,), tokenizer="bytes")
    digest = ByteTokenizer().digest
    order = token_process.Order(config.model_dump(mode="json"), None, digest, "uint16", str(tmp_path))
    with pytest.raises(DataUnreadable, match=rf"^{BROKEN} cannot be read on .* now \(Input/output error\)"):
        tokenize_shards(order, {0: (Section(BROKEN, 0, 9, 9),)}, lambda: None, lambda counts: None, 1)


def test_tokenizer_training_process_passes_on_a_storage_error(tmp_path):
    order = {
        "data": DataConfig(source="text", paths=(BROKEN,), tokenizer="bpe").model_dump(mode="json"),
        "files": [BROKEN], "sizes": [9], "path": str(tmp_path / "tokenizer.json"),
    }  # fmt: skip
    with pytest.raises(DataUnreadable, match=rf"^{BROKEN} cannot be read on .* now \(Input/output error\)"):
        trained_tokenizer._run(order, Watcher())


def test_token_cache_whose_mount_is_away_when_locked_is_reported_as_not_storing_now(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache.fcntl, "flock", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
    cannot = rf"the tokens cannot be kept in {tmp_path} \(Stale file handle\)"
    with pytest.raises(DataNotStored, match=cannot), token_cache.locked(tmp_path, Watcher()):
        pass


def test_queued_job_is_refused_for_missing_data_but_not_for_an_unreachable_mount(file):
    job = spec(data={"source": "text", "paths": [str(file)]})
    with away(file.parent):
        assert ANYWHERE.problem_of_data(job) is None
    with away(file.parent, errno.ENOENT):
        assert ANYWHERE.problem_of_data(job) == f"no such file or directory: {file}", "it is what is asked"
    file.unlink()
    assert ANYWHERE.problem_of_data(job) == f"no such file or directory: {file}"


def named_by(key, file):
    """A job that names the file, which something reads before the job runs."""
    if key == "data.template":
        data = {"source": "chat", "paths": [__file__], "template": str(file), "tokenizer": "bpe"}
    elif key == "data.paths":
        data = {"source": "megatron", "paths": [str(file.with_suffix(""))]}
    else:  # a file next to the tokenizer's
        data = {"source": "chat", "paths": [__file__], "tokenizer": str(byte_level(file.parent / "tokenizer.json"))}
        if key == "data.tokenizer":
            data |= {"source": "jsonl", "tokenizer": str(file), "tokenizer_vocabulary": 400}
    return spec(model={"vocabulary_size": 8192}, data=data)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), sparse], ids=KINDS)
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.tokenizer", "t.json"), ("data.template", "t.jinja"), ("data.paths", "a.idx"),
        ("beside", "tokenizer_config.json"), ("beside", "special_tokens_map.json"), ("beside", "chat_template.jinja"),
    ],
)  # fmt: skip
def test_pipe_device_or_oversized_file_is_bad_data_and_is_not_read(tmp_path, key, name, make):
    file = tmp_path / name
    file.with_suffix(".bin").touch()
    make(file)
    with pytest.raises(DataError) as error:
        ANYWHERE.check(named_by(key, file))
    assert not isinstance(error.value, DataUnreadable)
    assert str(file) in str(error.value)
    assert re.search("not a regular file|no such file|at most [0-9]+ are read", str(error.value))
    if key == "data.tokenizer":
        with pytest.raises(SpecError, match=r"data\.tokenizer: no tokenizer can be read from"):
            with_vocabulary(named_by(key, file))
