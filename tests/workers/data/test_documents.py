"""Documents of a corpus, one by one and packed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from engine_specs import axes, spec

from manta.workers.config import DataConfig
from manta.workers.data import documents, json_array, rows
from manta.workers.data.batches import NO_TARGET, Batches, Documents
from manta.workers.data.documents import raw_pieces_of, texts_of
from manta.workers.data.shards import Section
from manta.workers.errors import DataError

TEXTS = ["first", "", "zweites Dokument: Größe", "3\nlines\r\n", " ", "日本語", "x" * 70_000]


def section(path: Path, **changes) -> Section:
    size = path.stat().st_size
    return Section(**{"path": str(path), "start": 0, "stop": size, "bytes": size, **changes})


def read(path: Path, source: str, exact: bool = True, **data) -> list[str]:
    config = DataConfig(source=source, paths=[str(path)], **data)
    stop = {"stop": -1} if source == "parquet" else {}
    return [each.text for each in texts_of(section(path, **stop), config, exact) if each.text]


def lines(texts, key="text") -> bytes:
    return b"".join(json.dumps({key: text, "more": 1}, ensure_ascii=False).encode() + b"\n" for text in texts)


def write_compressed(folder: Path, content: bytes, kind: str) -> Path:
    path = folder / f"a.jsonl{kind}"
    if kind == ".gz":
        content = gzip.compress(content[: len(content) // 2]) + gzip.compress(content[len(content) // 2 :])
    elif kind == ".zst":
        pieces = content[: len(content) // 2], content[len(content) // 2 :]
        content = b"".join(zstandard.ZstdCompressor().compress(piece) for piece in pieces)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_a_line_of_jsonl_is_a_document(tmp_path, kind):
    path = write_compressed(tmp_path, b"\n" + lines(TEXTS) + b"  \r\n" + lines(["last"])[:-1], kind)
    assert read(path, "jsonl") == [text for text in [*TEXTS, "last"] if text]


def test_section_of_a_jsonl_file_gives_only_its_own_lines(tmp_path):
    path, first = tmp_path / "a.jsonl", lines(TEXTS[2:4])
    path.write_bytes(lines(TEXTS[:2]) + first + lines(TEXTS[4:]))
    start = len(lines(TEXTS[:2]))
    part = section(path, start=start, stop=start + len(first), bytes=len(first))
    config = DataConfig(source="jsonl", paths=[str(path)])
    assert [each.text for each in texts_of(part, config, True)] == TEXTS[2:4]


def test_jsonl_text_is_taken_from_the_key_that_the_job_names(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["hello"], "content"))
    assert read(tmp_path / "a.jsonl", "jsonl", text_key="content") == ["hello"]


WRONG_LINES = [
    (b'{"text": "cut', "not valid JSON ("),
    (b"[1]", 'not an object such as {"text": ...}'),
    (b'{"content": "a", "id": 1}', "no key 'text', only 'content', 'id': set data.text_key"),
    (b"{}", "no key 'text', only none"),
    (b'{"text": 3}', "'text' holds a number, not text"),
    (b'{"text": ["a"]}', "'text' holds a list, not text"),
    ("\ufeff{}\u0a0a".encode("utf-16-le"), "UTF-16, and only UTF-8 is read: convert the file"),
    (b'{"text": "\xff"}', "not UTF-8 (invalid start byte at byte 10 of the line)"),
    (b'{"text": "ab\\ud800"}', "character 3 of the text is half of a surrogate pair"),
    (b"[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize(("line", "said"), WRONG_LINES, ids=[str(n) for n in range(len(WRONG_LINES))])
def test_invalid_jsonl_line_is_reported_with_file_line_and_byte(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["one", "two"]) + line + b"\n" + lines(["three"]))
    with pytest.raises(DataError) as error:
        read(path, "jsonl")
    start = len(lines(["one", "two"]))
    assert str(error.value).startswith(f"{path}, line 3 (byte {start}): ")
    assert said in str(error.value)


def test_lines_are_counted_from_the_files_first_in_every_section(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["one", "two"]) + b"{}\n")
    start = len(lines(["one"]))
    config = DataConfig(source="jsonl", paths=[str(path)])
    with pytest.raises(DataError, match=rf"line 3 \(byte {2 * start}\): no key"):
        list(texts_of(section(path, start=start), config, True))


@pytest.mark.parametrize("kind", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.3, 0.97])
def test_truncated_compressed_file_is_refused_with_the_line_after_which_it_breaks_off(tmp_path, kind, keep):
    path = write_compressed(tmp_path, lines([f"{n} {n * n:b}" for n in range(3000)]), kind)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=rf"{path} cannot be decompressed after line \d+: it is cut short"):
        read(path, "jsonl")


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_uncompressed_file_with_a_compressed_suffix_is_refused_by_name(tmp_path, kind):
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(lines(["a"]))
    with pytest.raises(
        DataError, match=rf"cannot be decompressed after line 0: it is not valid {'gzip' if kind == '.gz' else 'zstd'}"
    ):
        read(path, "jsonl")


@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_entries_of_a_json_array_are_documents(tmp_path, monkeypatch, kind, block):
    monkeypatch.setattr(rows, "_BLOCK", block)
    texts = ["] of", '", {"', "Größe 🙂\n", *(f"{n}" * n * block for n in range(5))]
    for indent in (None, 0, 3):
        entries = [{"text": text, "more": [1.5, {"a": None}]} for text in texts]
        written = f" \n{json.dumps(entries, indent=indent, ensure_ascii=False)}\n\n".encode()
        path = write_compressed(tmp_path, b"\xef\xbb\xbf" * (indent is None) + written, kind)
        assert read(path, "jsonl") == [text for text in texts if text]
    assert read(write_compressed(tmp_path, b"[ ]", kind), "jsonl") == []


WRONG_ARRAYS = [
    (b'[{"text": "a"}, {"text": 3}]', ", entry 2: 'text' holds a number, not text"),
    (b'[{"text": "a"}, "b"]', ', entry 2: not an object such as {"text": ...}'),
    (b'[{"text": "a"} {"text": "b"}]', ", after entry 1: not valid JSON (a comma or ] is missing)"),
    (b'[{"text": "a"}, {"text" "b"}, {"text": "c"}]', ", entry 2: not valid JSON (Expecting ':' delimiter)"),
    (b'[{"text": "a"},', ", entry 2: not valid JSON (Expecting value)"),
    (b'[{"text": "a"}', ": the JSON array is cut short"),
    (b'[{"text": "a"}, {"text": "b', ", entry 2: not valid JSON (Unterminated string starting at)"),
    (b'[{"text": "a"}]\n{"text": "b"}', ": not valid JSON (something follows the array)"),
    (b'[{"text": "\xff"}]', ": not UTF-8 (invalid start byte)"),
    (b"[" * 100_000, ", entry 1: not valid JSON (maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("content", "said"), WRONG_ARRAYS, ids=[str(n) for n in range(len(WRONG_ARRAYS))])
def test_invalid_json_array_is_reported_with_file_and_entry(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        read(tmp_path / "a.json", "jsonl")
    assert str(error.value).startswith(f"{tmp_path / 'a.json'}{said}")


def test_long_json_array_is_read_an_entry_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "MAX_CHARACTERS", 1000)
    monkeypatch.setattr(rows, "_BLOCK", 100)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 300}] * 100))
    assert len(read(tmp_path / "a.json", "jsonl")) == 100
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 3000}] * 2))
    with pytest.raises(DataError, match=r"a\.json, entry 1 has no end within 1000 characters"):
        read(tmp_path / "a.json", "jsonl")


def parquet(path: Path, column, rows: int = 2) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(column)), "text": column}), path, row_group_size=rows)
    return path


def test_a_row_of_parquet_is_a_document(tmp_path):
    assert read(parquet(tmp_path / "a.parquet", TEXTS), "parquet") == [text for text in TEXTS if text]


def test_section_of_a_parquet_file_gives_only_its_own_row_groups(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["a", "b", "c", "d", "e"])
    config = DataConfig(source="parquet", paths=[str(path)])
    assert [each.text for each in texts_of(section(path, start=1, stop=2), config, True)] == ["c", "d"]


@pytest.mark.parametrize("none", [None, ""])
def test_null_and_empty_texts_are_empty_documents_in_every_format(tmp_path, none):
    texts = ["a", none, "b"]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    parquet(tmp_path / "a.parquet", texts)
    for name, source in (("a.json", "jsonl"), ("a.jsonl", "jsonl"), ("a.parquet", "parquet")):
        stop = {"stop": -1} if source == "parquet" else {}
        config = DataConfig(source=source, paths=["a"])
        found = texts_of(section(tmp_path / name, **stop), config, True)
        assert [(each.text, each.ends) for each in found] == [("a", True), ("", True), ("b", True)]


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.large_string()], ids=str)
def test_parquet_texts_of_other_types_are_decoded(tmp_path, kind):
    texts = [text for text in TEXTS if text]
    column = pyarrow.array([text if kind == pyarrow.large_string() else text.encode() for text in texts], kind)
    assert read(parquet(tmp_path / "a.parquet", column), "parquet") == texts


def test_bad_parquet_is_refused_with_its_column_row_or_file(tmp_path):
    numbers = parquet(tmp_path / "numbers.parquet", [1, 2])
    with pytest.raises(DataError, match=r"row 1: column 'text' holds int64, not text"):
        read(numbers, "parquet")
    with pytest.raises(DataError, match=r"no column 'content', only 'id', 'text': set data.text_key"):
        read(numbers, "parquet", text_key="content")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"b.parquet is not a parquet file that can be read"):
        read(tmp_path / "b.parquet", "parquet")
    good = parquet(tmp_path / "c.parquet", [f"{n}" * 50 for n in range(2000)], 500)
    content = bytearray(good.read_bytes())
    content[100:3000] = b"\xff" * 2900
    good.write_bytes(content)
    with pytest.raises(DataError, match=r"c.parquet cannot be read after row \d+"):
        read(good, "parquet")


def test_parquet_that_is_not_utf8_is_named(tmp_path):
    column = pyarrow.array([b"good", b"b\xffd"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    for number, each in enumerate((column, pyarrow.array([b"good", b"b\xffd"], pyarrow.binary()))):
        path = parquet(tmp_path / f"{number}.parquet", each)
        with pytest.raises(DataError, match=r"row 2: not UTF-8 .invalid start byte at byte 1"):
            read(path, "parquet")


def test_text_file_is_one_document_whole_or_cut_into_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n} é\n" for n in range(100)))
    config = DataConfig(source="text", paths=[str(path)])
    pieces = list(texts_of(section(path), config, True))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == path.read_text()
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    (whole,) = texts_of(section(path), config, False)
    assert (whole.text, whole.ends) == (path.read_text(), True)


def test_text_that_is_not_utf8_is_named_by_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"good line\n" * 10 + b"bad \xe9 line\n")
    with pytest.raises(DataError, match=rf"{path}, byte 104: not UTF-8 .*data.tokenizer: bytes, which takes any"):
        read(path, "text")


def test_text_that_must_not_be_cut_is_refused_beyond_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_UNSPLIT_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 30)
    assert len(read(path, "text")) == 1
    with pytest.raises(DataError, match=r"is one document of 150 bytes, .* give it as several files"):
        read(path, "text", exact=False)


@pytest.mark.parametrize("ends", [True, False])
def test_a_document_ends_with_the_last_piece_of_its_last_section(tmp_path, ends):
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 300_000)
    config = DataConfig(source="text", paths=[str(path)])
    pieces = list(texts_of(section(path, ends=ends), config, cuts_are_exact=True))
    assert len(pieces) > 1 and [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [ends]


def test_raw_bytes_are_read_unchanged_in_pieces(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)) * 10_000)
    pieces = list(raw_pieces_of(section(path)))
    assert b"".join(piece.content for piece in pieces) == path.read_bytes()
    assert [piece.ends for piece in pieces] == [False, False, True]
    assert not any(piece.ends for piece in raw_pieces_of(section(path, ends=False))), "others tokenize what follows"


CPU, END = torch.device("cpu"), 256
PACKED_TEXTS = ["abc", "d", "", "efghijklmnopqrstuvwxyz" * 3, "0123456789" * 4]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in PACKED_TEXTS * 5))
    return {
        "source": "jsonl", "paths": [str(path)], "end_of_document": "<|endoftext|>", "documents": "apart",
        "validation_fraction": 0.1,
    }  # fmt: skip


def batches_of(corpus, tmp_path, reads_tokens=True, **sections):
    return Batches(spec(data=corpus, **sections), 0, CPU, reads_tokens, cache=tmp_path / "cache")


def test_documents_lie_between_the_tokens_that_end_them():
    documents = Documents.of(torch.tensor([[1, END, END, 4, 5], [1, 2, 3, 4, END]]).numpy(), END)
    assert documents == Documents(((0, 2, 3), (0,)), 5)
    assert documents.lengths == [2, 1, 2, 5]
    assert documents.first_tokens().tolist() == [[0, 0, 2, 3, 3], [0] * 5]


def test_no_token_is_trained_to_predict_the_next_documents_first_token(corpus, tmp_path):
    ends = 0
    for step in (1, 2, 3):
        for batch in batches_of(corpus, tmp_path).training(step):
            inputs, targets = batch.inputs_sb, batch.targets_sb
            assert ((targets == NO_TARGET) == (inputs == END)).all()
            assert (targets[:-1][inputs[:-1] != END] == inputs[1:][inputs[:-1] != END]).all()
            assert batch.documents == Documents.of(inputs.t().numpy(), END)
            ends += int((inputs == END).sum())
    assert ends > 3


def test_stages_that_read_no_tokens_know_the_same_document_boundaries(corpus, tmp_path):
    whole, middle = (batches_of(corpus, tmp_path, reads).training(2) for reads in (True, False))
    assert [each.documents for each in middle] == [each.documents for each in whole]


def test_separating_documents_without_an_end_token_is_refused_before_training(corpus, tmp_path):
    job = spec(data=corpus)
    job = job.model_copy(update={"data": job.data.model_copy(update={"end_of_document": "none"})})
    with pytest.raises(DataError, match=r"data\.documents: apart needs to know the token that ends documents"):
        Batches(job, 0, CPU, cache=tmp_path / "cache")


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_validation_keeps_documents_apart(corpus, tmp_path, layout):
    batches = batches_of(corpus, tmp_path, train={"validate_every": 1}, parallel=axes(layout))
    (held_out,) = batches.held_out
    assert all(each.documents is not None for each in batches.validation(held_out, 0))
