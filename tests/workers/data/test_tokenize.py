"""`python -m manta.workers.data.tokenize`: the tokens that a job will find, and the same ones for Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from engine_specs import document
from tokenizer_files import TEXT, byte_level, plain_tokens

from manta.workers.data import tokenize
from manta.workers.data.indexed_dataset import IndexedTokens, read_index
from manta.workers.data.prepare import open_corpus
from manta.workers.data.token_cache import Watcher
from manta.workers.spec.reading import load_job_spec
from manta.workers.spec.submitted import with_vocabulary


@pytest.fixture
def config(tmp_path) -> Path:
    """A job with its corpus and its tokenizer beside it."""
    byte_level(tmp_path / "tokenizer.json")
    for name, texts in (("a.jsonl", TEXT[:50]), ("b.jsonl", TEXT[50:80])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return job_file(tmp_path)


def job_file(folder, **data) -> Path:
    path = folder / "job.yaml"
    data = {"source": "jsonl", "paths": ["a.jsonl", "b.jsonl"], "tokenizer": "tokenizer.json", **data}
    path.write_text(yaml.safe_dump(document(data=data)))
    return path


def run(config, tmp_path, *options):
    return tokenize.main([str(config), "--cache", str(tmp_path / "cache"), "--processes", "1", *options])


def test_job_finds_the_tokens_that_the_command_made(config, tmp_path, capsys):
    assert run(config, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(plain_tokens(tmp_path / "tokenizer.json", TEXT[:80]))
    assert lines[0].startswith("tokenizes 2 files (0.0 MB) of ")
    assert lines[-1].startswith(f"{count} tokens are in {tmp_path / 'cache'} (")

    class NothingToDo(Watcher):
        def report(self, kind, message, data):
            pytest.fail(message)

    corpus = open_corpus(with_vocabulary(load_job_spec(config)), tmp_path / "cache", watcher=NothingToDo())
    assert len(corpus) == count


@pytest.mark.parametrize("weights", [None, [1, 3]])
def test_a_copy_for_megatron_has_all_documents(config, tmp_path, weights):
    config = job_file(tmp_path, weights=weights)
    assert run(config, tmp_path, "--to", str(tmp_path / "out" / "corpus")) == 0
    row, index = IndexedTokens(tmp_path / "out" / "corpus"), read_index(tmp_path / "out" / "corpus")
    assert row.read(0, len(row)).tolist() == plain_tokens(tmp_path / "tokenizer.json", TEXT[:80])
    assert index.documents.tolist() == list(range(81))
    assert index.lengths.tolist() == [len(plain_tokens(tmp_path / "tokenizer.json", [text])) for text in TEXT[:80]]
    megatron = job_file(tmp_path, source="megatron", paths=["out/corpus"])
    again = open_corpus(with_vocabulary(load_job_spec(megatron)), tmp_path / "cache")
    assert again.read(0, len(again)).tolist() == row.read(0, len(row)).tolist()


def test_existing_megatron_dataset_is_not_overwritten(config, tmp_path, capsys):
    (tmp_path / "out.idx").write_text("precious")
    assert run(config, tmp_path, "--to", str(tmp_path / "out")) == 1
    assert "out.bin and " in capsys.readouterr().err
    assert (tmp_path / "out.idx").read_text() == "precious"


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        ({"tokenizer": "bytes", "source": "text"}, 1, "with data.tokenizer bytes this corpus is read as it is"),
        ({"tokenizer": "gone.json"}, 2, "data.tokenizer: no tokenizer can be read from "),
        ({"paths": ["gone.jsonl"]}, 1, "DataError: no such file or directory: "),
        ({"text_key": "body"}, 1, "line 1 (byte 0): no key 'body', only 'text': set data.text_key"),
    ],
)
def test_tokenize_command_reports_a_bad_job_in_one_sentence(config, tmp_path, capsys, data, status, said):
    assert run(job_file(tmp_path, **data), tmp_path) == status
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_progress_on_a_terminal_overwrites_one_line():
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    out = Terminal()
    watcher = tokenize.ProgressLines(out)
    watcher.report("data_preparing", "begins", {})
    watcher.report("data_progress", "10%", {})
    watcher.report("data_progress", "20%", {})
    watcher.report("data_prepared", "done", {})
    assert out.text == "begins\n10%\r\x1b[K20%\r\x1b[Kdone\n"
