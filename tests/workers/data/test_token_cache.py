"""The token cache holds what the tokenizer's library makes of whole documents, whoever made it, whatever came
between."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from tokenizer_files import TEXT, RecordingWatcher, byte_level, plain_tokens, sentence_piece_like
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from manta.workers.config import DataConfig
from manta.workers.data import shards, token_cache, token_process
from manta.workers.data.corpus_record import with_digests
from manta.workers.data.indexed_dataset import read_index
from manta.workers.data.sources import corpus_files
from manta.workers.data.token_cache import cached_tokens, locked, read_info
from manta.workers.data.tokenizer import open_tokenizer
from manta.workers.errors import DataError, DataNotStored

DOCUMENTS = ["".join(TEXT[n : n + 7]) for n in range(0, 280, 7)] + ["x", "end"]


@pytest.fixture
def many_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 4000)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def jsonl(folder: Path, documents=DOCUMENTS, name="a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make(root, paths, tokenizer, source="jsonl", watcher=None, **data):
    config = DataConfig(source=source, paths=[str(path) for path in paths], tokenizer=str(tokenizer), **data)
    return cached_tokens(
        root, with_digests(corpus_files(config)), config, open_tokenizer(config), None, watcher or RecordingWatcher()
    )


def test_shards_of_several_processes_are_the_librarys_tokens_of_all_documents(tmp_path, file, many_shards):
    watcher = RecordingWatcher(processes=2)
    row, info, made = make(tmp_path / "cache", [jsonl(tmp_path)], file, watcher=watcher)
    expected = plain_tokens(file, DOCUMENTS)
    assert row.read(0, len(row)).tolist() == expected
    assert made
    assert (info.tokens, info.documents, info.files, info.dtype) == (len(expected), len(DOCUMENTS), 1, "uint16")
    index = read_index(row.prefix)
    assert len(index.documents) == len(DOCUMENTS) + 1
    assert index.lengths.tolist() == [len(plain_tokens(file, [text])) for text in DOCUMENTS]
    assert watcher.kinds[0] == "data_preparing"
    assert watcher.said[-1][0] == "data_progress"
    assert watcher.said[-1][2]["percent"] == 100
    assert watcher.lives > 5
    assert sorted(each.name for each in (tmp_path / "cache").glob("*/*")) == [
        "cache.json", "lock", "plan.json", "tokens.bin", "tokens.idx",
    ]  # fmt: skip


def test_second_preparation_of_the_same_files_reuses_the_token_cache(tmp_path, file):
    first = make(tmp_path / "cache", [jsonl(tmp_path)], file)
    watcher = RecordingWatcher()
    second = make(tmp_path / "cache", [tmp_path / "a.jsonl"], file, watcher=watcher)
    assert (first[2], second[2], watcher.said) == (True, False, [])
    assert first[1] == second[1]


def test_jsonl_parquet_and_text_files_of_the_same_documents_give_the_same_tokens(tmp_path, file, many_shards):
    expected = plain_tokens(file, DOCUMENTS)
    jsonl(tmp_path)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    table = pyarrow.table({"text": DOCUMENTS})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=10, compression="none")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number:03d}.txt").write_text(text)
    for source, path in (("jsonl", "b.jsonl.gz"), ("parquet", "c.parquet"), ("text", "texts")):
        row, info, _ = make(tmp_path / "cache", [tmp_path / path], file, source)
        assert row.read(0, len(row)).tolist() == expected, source
        assert info.documents == len(DOCUMENTS)


def test_text_file_cut_into_shards_stays_one_document(tmp_path, file, many_shards):
    (tmp_path / "a.txt").write_text("".join(TEXT))
    row, info, _ = make(tmp_path / "cache", [tmp_path / "a.txt"], file, "text")
    assert row.read(0, len(row)).tolist() == plain_tokens(file, ["".join(TEXT)])
    assert info.documents == 1
    index = read_index(row.prefix)
    assert len(index.lengths) > 4
    assert index.documents.tolist() == [0, len(index.lengths)]


def test_a_tokenizer_that_may_not_be_given_pieces_gets_whole_files(tmp_path, many_shards):
    other = sentence_piece_like(tmp_path / "t.json")
    (tmp_path / "a.txt").write_text("".join(TEXT))
    row, _, _ = make(tmp_path / "cache", [tmp_path / "a.txt"], other, "text")
    assert row.read(0, len(row)).tolist() == plain_tokens(other, ["".join(TEXT)], "</s>")


def test_bytes_with_an_end_token_are_cached_as_tokens(tmp_path, many_shards):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    row, info, _ = make(tmp_path / "c", [tmp_path], "bytes", "text", end_of_document="<|endoftext|>")
    assert row.read(0, len(row)).tolist() == [*(list(range(256)) * 40), 256, 255, 256]
    assert info.documents == 2
    row, _, _ = make(tmp_path / "c", [jsonl(tmp_path, ["é", "b"])], "bytes")
    assert row.read(0, len(row)).tolist() == [0xC3, 0xA9, ord("b")]


def test_changed_tokenizer_end_token_or_file_makes_another_token_cache(tmp_path, file):
    path = jsonl(tmp_path, ["some text", "more"])
    other = byte_level(tmp_path / "other.json", 300)
    first = make(tmp_path / "cache", [path], file)
    assert make(tmp_path / "cache", [path], other)[2]
    none = make(tmp_path / "cache", [path], file, end_of_document="none")
    assert none[2]
    assert none[1].tokens == first[1].tokens - 2
    path.write_text(path.read_text().replace("more", "less"))
    os.utime(path, ns=(1, 1))
    changed = make(tmp_path / "cache", [path], file)
    assert changed[2]
    assert changed[1].digest != first[1].digest


def test_tokens_of_a_large_vocabulary_are_stored_as_int32(tmp_path, file):
    document = json.loads(file.read_text())
    document["model"]["vocab"]["never"] = 70_000
    (tmp_path / "large.json").write_text(json.dumps(document))
    row, info, _ = make(tmp_path / "cache", [jsonl(tmp_path)], tmp_path / "large.json")
    assert info.dtype == "int32"
    assert row.read(0, len(row)).tolist() == plain_tokens(file, DOCUMENTS)


@pytest.mark.parametrize("source", ["jsonl", "text"])
@pytest.mark.parametrize("around", ["<s> $A", "<s> $A <|endoftext|>", "<s> <s> $A </s>", "$A </s>"])
def test_special_tokens_of_the_tokenizers_file_surround_each_document_if_asked_for(
    tmp_path, many_shards, monkeypatch, around, source
):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1000)
    special = ["<|endoftext|>", "<s>", "</s>"]
    library = Tokenizer.from_file(str(byte_level(tmp_path / "t.json", special=special)))
    library.post_processor = TemplateProcessing(
        single=around, special_tokens=[(each, n) for n, each in enumerate(special)]
    )
    library.save(str(tmp_path / "t.json"))
    documents = ["".join(DOCUMENTS), "short", "".join(DOCUMENTS[:20])]
    if source == "text":
        paths = [tmp_path / f"{n}.txt" for n in range(len(documents))]
        for path, text in zip(paths, documents, strict=True):
            path.write_text(text)
    else:
        paths = [jsonl(tmp_path, documents)]
    row, _, _ = make(tmp_path / "cache", paths, tmp_path / "t.json", source, special_tokens=True)
    ends = [] if around.endswith("<|endoftext|>") else [0]
    expected = [token for text in documents for token in [*library.encode(text).ids, *ends]]
    assert row.read(0, len(row)).tolist() == expected
    plain, _, _ = make(tmp_path / "cache", paths, tmp_path / "t.json", source)
    assert plain.read(0, len(plain)).tolist() == [
        token for text in documents for token in [*library.encode(text, add_special_tokens=False).ids, 0]
    ]


def test_documents_without_text_are_left_out_and_counted(tmp_path, file, many_shards):
    documents = [text for each in DOCUMENTS for text in (each, None, "")]
    row, info, _ = make(tmp_path / "cache", [jsonl(tmp_path, documents)], file)
    assert row.read(0, len(row)).tolist() == plain_tokens(file, DOCUMENTS)
    assert (info.documents, info.left_out) == (len(DOCUMENTS), 2 * len(DOCUMENTS))


def test_entries_of_a_json_array_have_the_tokens_of_lines(tmp_path, file, many_shards):
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in DOCUMENTS], indent=1))
    row, _, _ = make(tmp_path / "cache", [tmp_path / "a.json"], file)
    assert row.read(0, len(row)).tolist() == plain_tokens(file, DOCUMENTS)


@pytest.mark.parametrize(
    ("data", "number"),
    [({}, 1), ({"source": "text"}, 2), ({"source": "chat", "template": "chatml"}, 2), ({"source": "parquet"}, 1)],
    ids=str,
)
def test_cache_version_changes_only_where_tokens_do(tmp_path, file, data, number):
    across = Tokenizer.from_file(str(file))
    across.add_tokens(["one\ntwo"])
    across.save(str(tmp_path / "across.json"))
    config = DataConfig(**{"source": "jsonl", "paths": ["a"], "tokenizer": str(tmp_path / "across.json"), **data})
    assert token_cache.describe([], config, open_tokenizer(config))["format"] == number
    plain = config.model_copy(update={"tokenizer": str(file)})
    expected = 2 if config.source == "chat" else 1
    assert token_cache.describe([], plain, open_tokenizer(plain))["format"] == expected
    assert "special_tokens" not in token_cache.describe([], plain, open_tokenizer(plain))


def test_bad_document_ends_tokenizing_and_is_named_by_file_and_line(tmp_path, file, many_shards):
    path = jsonl(tmp_path)
    with path.open("a") as opened:
        opened.write("{}\n")
    with pytest.raises(DataError, match=rf"{path}, line {len(DOCUMENTS) + 1} \(byte \d+\): no key 'text'"):
        make(tmp_path / "cache", [path], file, watcher=RecordingWatcher(processes=2))
    children = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [each for each in children if "token_process" in each]


def test_token_cache_folder_that_cannot_be_made_is_named_in_the_error(tmp_path, file):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataNotStored, match=rf"the tokens cannot be kept in {tmp_path / 'cache'}"):
        make(tmp_path / "cache", [jsonl(tmp_path)], file)


def test_token_cache_can_be_locked_on_a_full_disk_but_not_without_file_locks(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "pwrite", refused)
    with locked(tmp_path / "full", RecordingWatcher()):
        assert (tmp_path / "full" / "lock").exists()
    monkeypatch.setattr(fcntl, "flock", refused)
    expected = r"cannot be locked \(No locks available\): set MANTA_TOKEN_CACHE to"
    with pytest.raises(DataError, match=expected), locked(tmp_path / "cache", RecordingWatcher()):
        pass


def test_tokens_that_did_not_fit_on_a_full_disk_can_be_stored_later(tmp_path, file, monkeypatch):
    cannot = r"the tokens cannot be kept in .* \(No space left on device\)"
    with monkeypatch.context() as patch, pytest.raises(DataNotStored, match=cannot):
        patch.setattr(token_cache, "write_index", full)
        make(tmp_path / "cache", [jsonl(tmp_path)], file)
    assert make(tmp_path / "cache", [tmp_path / "a.jsonl"], file)[2]


def test_tokenizing_process_that_cannot_write_its_shard_reports_the_path(tmp_path, file):
    config = DataConfig(source="jsonl", paths=[str(jsonl(tmp_path))], tokenizer=str(file))
    order = token_process.Order(
        config.model_dump(mode="json"), None, open_tokenizer(config).digest, "uint16", str(tmp_path / "none"), None
    )
    (shard,) = shards.shards_of(corpus_files(config), config, True)
    with pytest.raises(DataNotStored, match=r"cannot write tokens: .*/none/"):
        token_process.tokenize_shards(order, {0: shard}, lambda: None, lambda counts: None, 1)


def test_killed_tokenizing_process_is_replaced_by_another(tmp_path, file, many_shards, monkeypatch):
    killed = []
    give_next = token_process._Work._assign_next

    def give(self, worker):
        give_next(self, worker)
        if worker.shard == 3 and not killed:
            killed.append(worker.process.pid)
            worker.process.kill()

    monkeypatch.setattr(token_process._Work, "_assign_next", give)
    row, _, _ = make(tmp_path / "cache", [jsonl(tmp_path)], file, watcher=RecordingWatcher(processes=2))
    assert len(killed) == 1
    assert row.read(0, len(row)).tolist() == plain_tokens(file, DOCUMENTS)


def test_shard_that_kills_every_process_is_given_up_with_an_error(tmp_path, file, monkeypatch):
    give_next = token_process._Work._assign_next

    def give(self, worker):
        worker.process.kill()  # before it can be done with the shard
        give_next(self, worker)

    monkeypatch.setattr(token_process._Work, "_assign_next", give)
    with pytest.raises(DataError, match=r"tokenizes .*a.jsonl ended with exit code -9, perhaps for lack of memory"):
        make(tmp_path / "cache", [jsonl(tmp_path)], file)


PROGRAM = """
import sys, time
from pathlib import Path
from manta.workers.config import DataConfig
from manta.workers.data import shards
from manta.workers.data.corpus_record import with_digests
from manta.workers.data.sources import corpus_files
from manta.workers.data.token_cache import Watcher, cached_tokens
from manta.workers.data.tokenizer import open_tokenizer
shards.SHARD_BYTES = 4000
config = DataConfig(source="jsonl", paths=[sys.argv[2]], tokenizer=sys.argv[3])

class StandsStill(Watcher):
    processes = 1
    def alive(self):
        while stops_at and len(list(Path(sys.argv[1]).glob("*/shard-*.json"))) >= stops_at:
            time.sleep(1)

stops_at, watcher = int(sys.argv[4]), StandsStill()
files = with_digests(corpus_files(config))
_, info, made = cached_tokens(Path(sys.argv[1]), files, config, open_tokenizer(config), None, watcher)
print(info.digest, made)
"""


def start_program(root, path, file, stops_at=0):
    """`stops_at`: shards that are made at most, and then it stands still; 0: all of them."""
    command = [sys.executable, "-c", PROGRAM, str(root), str(path), str(file), str(stops_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def test_shards_made_by_a_killed_process_are_used_by_the_next_one(tmp_path, file, many_shards):
    path = jsonl(tmp_path, DOCUMENTS * 20)
    process = start_program(tmp_path / "cache", path, file, stops_at=3)
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "cache").glob("*/shard-*.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, 10)
    assert not [child for child in children if child.is_running()], "its processes end with it"
    done = {each: each.stat().st_mtime_ns for each in (tmp_path / "cache").glob("*/shard-*.json")}
    (folder,) = {each.parent for each in done}
    assert read_info(folder) is None
    kept = []
    spied = token_process.tokenize_shards

    def spy(order, missing, *rest):
        kept.append(len(done) + len(missing))
        assert all(int(each.name[6:11]) not in missing for each in done)
        return spied(order, missing, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manta.workers.data.token_cache.tokenize_shards", spy)
        watcher = RecordingWatcher()
        row, _, made = make(tmp_path / "cache", [path], file, watcher=watcher)
    assert made
    assert f"of which {len(done)} shards are tokenized already" in watcher.said[0][1]
    assert row.read(0, len(row)).tolist() == plain_tokens(file, DOCUMENTS * 20)


def test_one_of_several_programs_that_want_the_same_tokens_makes_them(tmp_path, file):
    path = jsonl(tmp_path, DOCUMENTS * 20)
    programs = [start_program(tmp_path / "cache", path, file) for _ in range(3)]
    answers = [program.communicate(timeout=60)[0].split() for program in programs]
    assert len({digest for digest, _ in answers}) == 1
    assert sorted(made for _, made in answers) == ["False", "False", "True"]


def test_program_that_waits_for_the_cache_names_its_holder_and_shows_life(tmp_path, file):
    path, root = jsonl(tmp_path), tmp_path / "cache"
    make(root, [path], file)
    (folder,) = root.iterdir()
    (folder / "cache.json").unlink()
    descriptor = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    watcher = RecordingWatcher()
    waiting = threading.Thread(target=make, args=(root, [path], file), kwargs={"watcher": watcher}, daemon=True)
    waiting.start()
    deadline = time.monotonic() + 20
    while watcher.lives < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watcher.kinds == ["data_awaited"]
    assert f"process {os.getpid()} on " in watcher.said[0][1]
    os.close(descriptor)
    waiting.join(20)
    assert not waiting.is_alive()
    assert read_info(folder) is not None


def test_token_cache_with_truncated_tokens_is_made_again(tmp_path, file):
    row, info, _ = make(tmp_path / "cache", [jsonl(tmp_path)], file)
    os.truncate(f"{row.prefix}.bin", 10)
    row.close()
    again, same, made = make(tmp_path / "cache", [tmp_path / "a.jsonl"], file)
    assert made
    assert same.digest == info.digest
    assert again.read(0, len(again)).tolist() == plain_tokens(file, DOCUMENTS)


def test_token_cache_with_overwritten_tokens_is_made_again(tmp_path, file):
    first, _, _ = make(tmp_path / "cache", [jsonl(tmp_path)], file)
    expected = first.read(0, len(first)).tolist()
    with Path(f"{first.prefix}.bin").open("r+b") as stored:
        stored.seek(len(expected) // 2 * 2)
        stored.write(b"\0" * 16)
    os.utime(f"{first.prefix}.bin", ns=(1, 1))
    with pytest.raises(DataNotStored, match=r"tokens\.bin is not what it was .*: it is recreated at the next start"):
        first.read(0, 8)
    row, _, made = make(tmp_path / "cache", [tmp_path / "a.jsonl"], file)
    assert made and row.read(0, len(row)).tolist() == expected
