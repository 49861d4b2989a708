"""A tokenizer that is trained on a corpus is the same whoever trains it, on however many cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_files import chat_file, said
from tokenizer_files import TEXT
from tokenizers import Tokenizer

from manta.workers.config import DataConfig
from manta.workers.data import trained_tokenizer as module
from manta.workers.data.corpus_record import with_digests
from manta.workers.data.sources import CorpusFile, corpus_files
from manta.workers.data.token_cache import Watcher
from manta.workers.data.tokenizer import open_tokenizer
from manta.workers.errors import DataError, DataNotStored


class RecordingWatcher(Watcher):
    """Keeps what it is told."""

    def __init__(self):
        self.said, self.lives = [], 0

    def alive(self):
        self.lives += 1

    def report(self, kind, message, data):
        self.said.append((kind, data))


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(TEXT))
    return path


def trained(root, path, size=500, watcher=None, source="text", **data):
    config = DataConfig(source=source, paths=[str(path)], tokenizer="bpe", tokenizer_vocabulary=size, **data)
    file = module.trained_tokenizer(root, with_digests(corpus_files(config)), config, watcher or RecordingWatcher())
    return file, open_tokenizer(config, file)


def test_tokenizer_is_trained_once_and_decodes_every_text_back(tmp_path, corpus):
    watcher = RecordingWatcher()
    file, tokenizer = trained(tmp_path / "cache", corpus, watcher=watcher)
    assert [kind for kind, _ in watcher.said] == ["tokenizer_training", "tokenizer_trained"]
    assert watcher.lives > 0
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (500, 0)
    plain = Tokenizer.from_file(str(file))
    strange = "".join(TEXT) + "\x00\u2603 \U0001f600 never seen\r\n\t"
    assert plain.decode(tokenizer.encode([strange])[0]) == strange
    assert len(tokenizer.encode(["".join(TEXT)])[0]) < len("".join(TEXT)) / 2
    again = RecordingWatcher()
    assert trained(tmp_path / "cache", corpus, watcher=again)[0] == file
    assert again.said == []


def test_tokenizer_is_trained_on_conversations_as_the_template_writes_them(tmp_path):
    chats = chat_file(tmp_path / "chats.jsonl", [said(f"what is {n}?", "a number") for n in range(50)])
    _, tokenizer = trained(tmp_path / "cache", chats, 300, source="chat", template="chatml")
    (ids,) = tokenizer.encode(["<|im_start|>assistant\na number<|im_end|>"])
    assert len(ids) < 20, "41 bytes"


def test_trained_tokenizer_does_not_depend_on_cores_or_hash_seed(tmp_path, corpus, monkeypatch):
    first, _ = trained(tmp_path / "one", corpus)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    second, _ = trained(tmp_path / "two", corpus)
    assert first.read_bytes() == second.read_bytes()


def test_tokenizer_of_a_tiny_corpus_has_fewer_tokens_than_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    _, tokenizer = trained(tmp_path / "cache", tmp_path / "a.txt", 5000)
    assert 257 <= tokenizer.vocabulary <= 258


def test_trained_tokenizer_has_the_size_and_end_token_of_the_job(tmp_path, corpus):
    first, _ = trained(tmp_path / "cache", corpus, 300)
    second, tokenizer = trained(tmp_path / "cache", corpus, 301, end_of_document="<end>")
    assert first != second
    assert json.loads(second.read_text())["added_tokens"][0]["content"] == "<end>"
    assert tokenizer.end_of_document == 0
    assert trained(tmp_path / "cache", corpus, 300, end_of_document="none")[1].end_of_document is None


def test_tokenizer_is_trained_on_a_share_of_each_shard_of_a_large_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_BYTES", 2000)
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {n}\n" for n in range(1000)))
    monkeypatch.setattr("manta.workers.data.shards.SHARD_BYTES", 100)
    monkeypatch.setattr("manta.workers.data.documents.CHUNK_BYTES", 100)
    config = DataConfig(source="text", paths=[str(tmp_path)], tokenizer="bpe")
    files = [CorpusFile(str(path), path.stat().st_size) for path in sorted(tmp_path.glob("*.txt"))]
    texts = "".join(module._training_texts([[section] for section in sections_of(files)], config))
    assert {line[0] for line in texts.splitlines()} == set("abcd")
    assert 2000 <= len(texts) <= 4000


def sections_of(files):
    from manta.workers.data.shards import Section

    return [Section(file.path, 0, file.size, file.size) for file in files]


def test_training_a_tokenizer_on_a_bad_corpus_names_file_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff")
    with pytest.raises(DataError, match=r"a.txt, byte 5: not UTF-8"):
        trained(tmp_path / "cache", tmp_path / "a.txt")


def test_tokenizer_training_process_that_fails_is_reported_with_its_cause(tmp_path, corpus, monkeypatch):
    order = {
        "data": DataConfig(source="text", paths=[str(corpus)], tokenizer="bpe").model_dump(mode="json"),
        "files": [str(corpus)], "sizes": [corpus.stat().st_size], "path": str(tmp_path / "none" / "tokenizer.json"),
    }  # fmt: skip
    with pytest.raises(DataNotStored, match=r"the tokenizer cannot be kept: .*/none/.* \(No such file or directory\)"):
        module._run(order, RecordingWatcher())
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="the process that trains the tokenizer ended with exit code 1"):
        module._run(order | {"files": ["a long name"] * 100_000}, RecordingWatcher())
