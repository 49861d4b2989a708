"""Tokenizers of files make the tokens that their library makes, know how a document ends, or say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_files import TEXT, byte_level, plain_tokens, sentence_piece_like, split_as_llama_3
from tokenizers import AddedToken, Tokenizer, models

from manta.workers.config import DataConfig
from manta.workers.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from manta.workers.errors import DataError


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def test_file_tokenizer_makes_the_same_tokens_as_the_library(file):
    ids = [token for each in FileTokenizer(file).encode(TEXT) for token in each]
    assert ids == plain_tokens(file, TEXT, None)


def test_neither_truncation_nor_padding_nor_added_tokens_change_a_text(file, tmp_path):
    other = Tokenizer.from_file(str(file))
    other.enable_truncation(4)
    other.enable_padding(length=600)
    other.save(str(tmp_path / "short.json"))
    assert FileTokenizer(tmp_path / "short.json").encode(TEXT[:3]) == FileTokenizer(file).encode(TEXT[:3])


def by_words(path: Path, vocabulary: dict[str, int], *added: AddedToken) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path))
    return path


def test_vocabulary_counts_unused_ids_below_the_highest(tmp_path):
    path = by_words(tmp_path / "t.json", {"a": 0, "b": 7})
    assert FileTokenizer(path, "none").vocabulary == 8


def test_ordinary_word_named_like_an_end_token_ends_no_documents_unless_chosen(tmp_path):
    path = by_words(tmp_path / "t.json", {"a": 0}, AddedToken("</s>", special=False))
    with pytest.raises(DataError, match="no special token that is known to end a document: set"):
        FileTokenizer(path)
    assert FileTokenizer(path, "</s>").end_of_document == 1


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<eos>", "[SEP]"])
def test_the_end_of_a_document_is_found_among_the_special_tokens(tmp_path, end):
    path = byte_level(tmp_path / "tokenizer.json", special=["<pad>", end])
    assert FileTokenizer(path).end_of_document == 1
    assert FileTokenizer(path, "<pad>").end_of_document == 0
    assert FileTokenizer(path, "none").end_of_document is None


def test_tokenizer_without_a_known_or_the_named_end_token_is_refused(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", special=["<pad>"])
    with pytest.raises(DataError, match=r"no special token that is known to end a document .its special tokens: <pad>"):
        FileTokenizer(path)
    with pytest.raises(DataError, match=r"has no token '<end>': set data.end_of_document"):
        FileTokenizer(path, "<end>")


def test_tokenizer_vocabulary_reaches_to_the_highest_token_id(file, tmp_path):
    assert FileTokenizer(file).vocabulary == 400
    other = Tokenizer.from_file(str(file))
    other.add_special_tokens([AddedToken("<more>", special=True)])
    document = json.loads(other.to_str())
    document["added_tokens"][-1]["id"] = 999  # ids with a gap between them
    (tmp_path / "gap.json").write_text(json.dumps(document))
    assert FileTokenizer(tmp_path / "gap.json").vocabulary in (401, 1000)
    ids = FileTokenizer(tmp_path / "gap.json").encode(["<more>"])[0]
    assert FileTokenizer(tmp_path / "gap.json").vocabulary == ids[0] + 1


def test_texts_are_cut_only_for_tokenizers_that_make_the_same_of_the_pieces(file, tmp_path):
    assert FileTokenizer(file).cuts_are_exact
    assert FileTokenizer(split_as_llama_3(tmp_path / "3.json")).cuts_are_exact
    assert not FileTokenizer(sentence_piece_like(tmp_path / "t.json")).cuts_are_exact


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a tokenizer.json that the library tokenizers reads"),
        (b"{}", "is not a tokenizer.json that the library tokenizers reads"),
        (b"\xff\xfe", "is not a tokenizer.json that the library tokenizers reads"),
        (b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}', "is not a tokenizer.json"),
    ],
)
def test_file_that_is_not_a_tokenizer_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path / 'bad.json'} {said}"):
        FileTokenizer(tmp_path / "bad.json")


def test_tokenizer_that_was_never_trained_is_refused(tmp_path):
    from tokenizers import models

    Tokenizer(models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"has no tokens: it is a tokenizer that was never trained"):
        FileTokenizer(tmp_path / "t.json")


def test_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(DataError, match=rf"no tokenizer can be read from {tmp_path / 'gone.json'} .No such file"):
        FileTokenizer(tmp_path / "gone.json")


def test_different_tokenizer_files_have_different_digests(file, tmp_path):
    other = byte_level(tmp_path / "other.json", 300)
    assert FileTokenizer(file).digest != FileTokenizer(other).digest


def test_tokenizer_folder_opens_the_same_tokenizer_as_its_file(file):
    data = DataConfig(source="text", paths=["a"], tokenizer=str(file.parent))
    assert open_tokenizer(data).digest == FileTokenizer(file).digest


def test_byte_tokenizer_may_have_an_end_of_document_token():
    plain, ended = (
        open_tokenizer(DataConfig(source="jsonl", paths=["a"], end_of_document=end)) for end in (None, "<|endoftext|>")
    )
    assert (plain.vocabulary, plain.end_of_document) == (256, None)
    assert (ended.vocabulary, ended.end_of_document) == (257, 256)
    assert [list(each) for each in ByteTokenizer().encode(["é"])] == [[0xC3, 0xA9]]
