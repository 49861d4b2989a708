"""A job's corpus, out of the cache or in place, and that it stays the same for the job's whole life."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_specs import spec
from megatron_files import DOCUMENTS, megatron_dataset
from tokenizer_files import TEXT, RecordingWatcher, byte_level, plain_tokens
from tokenizers import Tokenizer

from manta.workers.data import prepare, unchanged_file
from manta.workers.data.batches import Batches
from manta.workers.data.prepare import open_corpus
from manta.workers.data.sources import check_data
from manta.workers.errors import DataError
from manta.workers.spec.problems import SpecError
from manta.workers.spec.submitted import with_vocabulary

CPU = torch.device("cpu")
DATASETS = {"good": [1, 2, 3], "empty": [], "negative": [1, -1, 2], "large": [1, 9999]}


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in TEXT[60 * number : 60 * (number + 1)])
        )
    return folder


def job(paths, file, model=None, **data):
    data = {"source": "jsonl", "paths": [str(path) for path in paths], "tokenizer": str(file), **data}
    return spec(data=data, model={"vocabulary_size": 512, **(model or {})})


def test_a_directory_is_one_row_of_its_files_tokens(texts, file, tmp_path):
    watcher = RecordingWatcher()
    corpus = open_corpus(job([texts], file), tmp_path / "cache", watcher=watcher)
    expected = plain_tokens(file, TEXT[:180])
    assert corpus.read(0, len(corpus)).tolist() == expected
    kind, message, data = watcher.said[-1]
    assert kind == "data_prepared"
    assert message.startswith(f"tokenized {len(expected):,} tokens of 180 documents in 3 files of {texts} in ")
    assert (data["tokens"], data["documents"], data["files"], data["made"]) == (len(expected), 180, 3, True)
    assert data["seconds"] > 0


def test_added_token_beyond_the_weights_is_accepted_until_a_text_has_it(texts, file, tmp_path):
    library = Tokenizer.from_file(str(file))
    library.add_special_tokens(["[PAD]"])
    library.save(str(tmp_path / "padded.json"))
    model = {"vocabulary_size": 400, "from": str(tmp_path / "weights")}
    padded = with_vocabulary(job([texts], tmp_path / "padded.json", model))
    corpus = open_corpus(padded, tmp_path / "cache")
    assert corpus.read(0, len(corpus)).tolist() == plain_tokens(file, TEXT[:180])
    (texts / "4.jsonl").write_text('{"text": "some [PAD] text"}')
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=r"which has the token '\[PAD\]', has token ids up to 400, but the model .*"
            r"below 400: use the tokenizer of the weights in .*weights, or add rows to these first",
        ):
            open_corpus(padded, tmp_path / "cache")
    with pytest.raises(SpecError, match=r"has token ids up to 399, but the model knows those below 300: use the token"):
        with_vocabulary(job([texts], tmp_path / "padded.json", model | {"vocabulary_size": 300}))


def test_with_weights_each_path_is_a_part_and_has_a_cache_of_its_own(texts, file, tmp_path):
    paths = sorted(texts.iterdir())
    corpus = open_corpus(job(paths, file, weights=[1, 2, 1]), tmp_path / "cache")
    assert [len(part) for part in corpus.parts] == [len(plain_tokens(file, TEXT[n : n + 60])) for n in (0, 60, 120)]
    watcher = RecordingWatcher()
    open_corpus(job(paths[1:], file, weights=[3, 1]), tmp_path / "cache", watcher=watcher)
    assert watcher.said == [], "another blend of them needs no other tokens"


def test_a_blends_batches_come_from_its_parts_in_the_ratio_of_the_weights(texts, file, tmp_path):
    paths = sorted(texts.iterdir())
    job_ = job(paths, file, weights=[1, 2, 1], validation_fraction=0.1)
    job_ = job_.model_copy(update={"train": job_.train.model_copy(update={"validate_every": 1})})
    blended = Batches(job_, 0, CPU, cache=tmp_path / "cache")
    tokens = [plain_tokens(file, TEXT[n : n + 60]) for n in (0, 60, 120)]
    ends = [len(part) - int(len(part) * 0.1) for part in tokens]
    assert blended.training_tokens == sum(ends)
    counts = [0, 0, 0]
    for step in range(1, 9):
        for part in blended.training(step):
            window = [*part.inputs_sb[:, 0].tolist(), part.targets_sb[-1, 0].item()]
            sample = part.samples.start
            number, _ = blended.order.blend.locate(sample)
            start = blended.order.start(sample) - blended.corpus.begins[number]
            assert window == tokens[number][start : start + 9]
            assert start + 9 <= ends[number], "what is held out is never trained on"
            counts[number] += 1
    assert counts == [16, 32, 16]
    held_out = [part.inputs_sb[:, 0].tolist() for part in blended.validation(blended.held_out[0], 0)]
    assert held_out[0] == tokens[1][ends[1] : ends[1] + 8]
    assert {tuple(each) for each in held_out} <= {
        tuple(tokens[n][start : start + 8]) for n in range(3) for start in range(ends[n], len(tokens[n]) - 8, 8)
    }


def test_blends_of_bytes_need_no_cache(tmp_path):
    for name, size in (("a.txt", 200), ("b.txt", 300)):
        (tmp_path / name).write_bytes(bytes([ord(name[0])]) * size)
    data = {"paths": [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], "weights": [0.25, 0.75]}
    batches = Batches(spec(data=data), 0, CPU)
    letters = [part.inputs_sb[0, 0].item() for step in range(1, 5) for part in batches.training(step)]
    assert (letters.count(ord("a")), letters.count(ord("b"))) == (8, 24)


def test_too_short_part_of_a_blend_is_refused_with_its_path(texts, file, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a"}\n')
    job_ = job([texts, short], file, weights=[1, 1])
    with pytest.raises(DataError, match=rf"has 2 tokens for training, .* use more text than {short}"):
        Batches(job_, 0, CPU, cache=tmp_path / "cache")


def test_megatrons_datasets_are_read_in_place(tmp_path):
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, 500, 300).tolist() for _ in range(2)]
    for name, row in zip("ab", rows, strict=True):
        megatron_dataset(tmp_path / name, [[row[:100]], [row[100:150], row[150:]]])
    for paths in ([tmp_path], [tmp_path / "a", tmp_path / "b.idx"], [tmp_path / "a.bin", tmp_path / "b"]):
        corpus = open_corpus(job(paths, "bytes", source="megatron"), tmp_path / "cache")
        assert corpus.read(0, 600).tolist() == rows[0] + rows[1]
        assert corpus.read(295, 10).tolist() == rows[0][-5:] + rows[1][:5]
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


def test_tokenizer_of_a_megatron_dataset_is_kept_with_the_job(tmp_path, file):
    prefix = megatron_dataset(tmp_path / "a", [[list(range(400))]])
    job_ = job([prefix], file, source="megatron")
    open_corpus(job_, tmp_path / "cache", tmp_path / "job" / "corpus.json", True)
    assert (tmp_path / "job" / "tokenizer.json").read_bytes() == file.read_bytes()


def test_dataset_with_token_ids_outside_the_vocabulary_is_refused(tmp_path):
    prefix = megatron_dataset(tmp_path / "a", [[list(range(600))]])
    with pytest.raises(DataError, match=rf"{prefix}.bin has token ids up to 599, but the model knows those below 512"):
        open_corpus(job([prefix], "bytes", source="megatron"), tmp_path / "cache")
    assert len(open_corpus(job([prefix], "bytes", {"vocabulary_size": 600}, source="megatron"), tmp_path / "cache"))
    negative = megatron_dataset(tmp_path / "b", [[[1, -1, 2]]], 4, "<i4")
    with pytest.raises(DataError, match=r"holds -1, which is not a token"):
        open_corpus(job([negative], "bytes", source="megatron"), tmp_path / "cache")


def test_empty_or_refused_datasets_are_closed_and_only_used_ones_stay_open(tmp_path, monkeypatch):
    opened = []

    class Opened(prepare.IndexedTokens):
        def __init__(self, prefix):
            super().__init__(prefix)
            opened.append(self)

    def are_closed(*names):
        paths = [megatron_dataset(tmp_path / name, [[DATASETS[name]]], 4, "<i4") for name in names]
        opened.clear()
        try:
            open_corpus(job(paths, "bytes", source="megatron", weights=[1] * len(paths)), tmp_path / "cache")
        finally:
            closed.append([row._file._file.closed for row in opened])

    closed = []
    monkeypatch.setattr(prepare, "IndexedTokens", Opened)
    are_closed("good", "empty")
    for refused in ("negative", "large"):
        with pytest.raises(DataError):
            are_closed("good", refused)
    assert closed == [[False, True], [True, True], [True, True]]


def test_data_is_checked_before_anything_is_tokenized(tmp_path, texts, file):
    check_data(job([texts], file))
    with pytest.raises(DataError, match=r"has token ids up to 399, but the model knows those below 300"):
        check_data(job([texts], file, {"vocabulary_size": 300}))
    with pytest.raises(DataError, match=r"no such file or directory"):
        check_data(job([tmp_path / "gone"], file))
    with pytest.raises(DataError, match=r"no tokenizer can be read from"):
        check_data(job([texts], tmp_path / "gone.json"))
    check_data(job([megatron_dataset(tmp_path / "a", DOCUMENTS)], "bytes", source="megatron"))
    with pytest.raises(DataError, match=r"has 10 tokens for training, but one sequence with its targets needs 17"):
        check_data(job([tmp_path / "a"], "bytes", {"sequence_length": 16}, source="megatron", validation_fraction=0.0))
    with pytest.raises(DataError, match=r"no such file: .*gone.bin .an indexed dataset is a .bin and its .idx"):
        check_data(job([tmp_path / "gone"], "bytes", source="megatron"))
    (tmp_path / "folder").mkdir()
    for source in ("jsonl", "parquet"):
        with pytest.raises(DataError, match=rf"no {source} file below {tmp_path / 'folder'}"):
            check_data(job([tmp_path / "folder"], file, source=source))


@pytest.fixture
def begun(texts, file, tmp_path):
    """A job that has begun: opens its corpus again."""
    own = tmp_path / "own.json"
    shutil.copy(file, own)
    record = tmp_path / "job" / "corpus.json"

    def again(records=False, cache="cache"):
        return open_corpus(job([texts], own), tmp_path / cache, record, records)

    again(records=True)
    return again


def test_job_folder_keeps_the_tokenizer_and_other_caches_give_the_same_tokens(begun, tmp_path, file):
    assert (tmp_path / "job" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert begun().digest == begun(cache="another node's").digest


def test_tokenizer_file_replaced_after_the_job_began_is_refused(begun, tmp_path):
    byte_level(tmp_path / "own.json", 350)
    with pytest.raises(DataError, match=r"the tokenizer .*own.json is not what it was when the job began: put it back"):
        begun()


def test_corpus_file_with_a_new_time_but_the_same_content_is_accepted(begun, texts):
    os.utime(texts / "1.jsonl", ns=(1, 1))
    assert begun().digest == begun().digest


@pytest.fixture
def small_samples(monkeypatch):
    monkeypatch.setattr(unchanged_file, "SAMPLE_BYTES", 64)


def test_change_between_the_samples_of_a_file_is_noticed_in_its_tokens(small_samples, begun, texts):
    path = texts / "1.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-600] + content[-600:-300].replace(b"squared", b"SQUARED") + content[-300:])
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=rf"what is made of {texts} is not what it was when the job began"):
        begun()


def test_corpus_file_changed_at_its_beginning_is_refused_before_tokens_are_made(begun, texts, tmp_path):
    path = texts / "1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"number", b"NUMBER"))
    caches = sorted((tmp_path / "cache").iterdir())
    with pytest.raises(DataError, match=rf"{path} is not what it was when the job began"):
        begun()
    assert sorted((tmp_path / "cache").iterdir()) == caches


def test_trained_tokenizer_is_kept_with_the_job_and_a_changed_one_refused(texts, tmp_path):
    record = tmp_path / "job" / "corpus.json"
    bpe = spec(data={"source": "jsonl", "paths": [str(texts)], "tokenizer": "bpe", "tokenizer_vocabulary": 300})
    first = open_corpus(bpe, tmp_path / "cache", record, True)
    (trained,) = (tmp_path / "cache").glob("bpe-*/tokenizer.json")
    assert (tmp_path / "job" / "tokenizer.json").read_bytes() == trained.read_bytes()
    assert first.read(0, len(first)).tolist() == plain_tokens(trained, TEXT[:180])
    byte_level(trained, 290)
    with pytest.raises(DataError, match=r"the tokenizer bpe is not what it was when the job began"):
        open_corpus(bpe, tmp_path / "cache", record)


def test_validation_sets_are_tokenized_as_the_corpus_is(texts, tmp_path):
    (tmp_path / "held.txt").write_text("".join(TEXT[200:230]))
    sets = [{"name": "held", "paths": [str(tmp_path / "held.txt")], "source": "text"}]
    data = {"source": "jsonl", "paths": [str(texts)], "tokenizer": "bpe", "tokenizer_vocabulary": 300}
    job_ = spec(data=data | {"validation": sets, "validation_fraction": 0.0}, train={"validate_every": 1})
    record = tmp_path / "job" / "corpus.json"
    batches = Batches(job_, 0, CPU, record=record, records=True, cache=tmp_path / "cache")
    (trained,) = (tmp_path / "cache").glob("bpe-*/tokenizer.json")
    (held_out,) = batches.held_out
    assert held_out.corpus.read(0, held_out.tokens).tolist() == plain_tokens(trained, ["".join(TEXT[200:230])])
    (tmp_path / "held.txt").write_text("".join(TEXT[200:230]).replace("follows", "FOLLOWS"))
    os.utime(tmp_path / "held.txt", ns=(1, 1))
    with pytest.raises(DataError, match=r"held.txt is not what it was when the job began"):
        Batches(job_, 0, CPU, record=record, cache=tmp_path / "cache")
