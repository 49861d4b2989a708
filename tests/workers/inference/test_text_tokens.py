"""A trained model is given the tokens of the tokenizer that it was trained with."""

from __future__ import annotations

import pytest
from engine_specs import spec
from tokenizer_files import TEXT, byte_level, plain_tokens

from manta.workers.errors import DataError
from manta.workers.inference.loaded_model import text_tokens_of


def job(file, **data):
    return spec(data={"tokenizer": str(file), "tokenizer_vocabulary": 400, **data})


@pytest.mark.parametrize("kept", ["checkpoints/tokenizer.json", "tokenizer.json"])
def test_the_kept_tokenizer_comes_before_the_file_that_the_spec_names(tmp_path, kept):
    """As the engine alone keeps it, and as a job of the service does."""
    (tmp_path / "checkpoints").mkdir()
    byte_level(tmp_path / kept)
    other = byte_level(tmp_path / "other.json", 300)
    tokens = text_tokens_of(job(other), tmp_path / "checkpoints" / "step-3")
    text = "".join(TEXT[:5])
    assert tokens.encode(text) == plain_tokens(tmp_path / kept, [text], None)
    assert tokens.decode([*tokens.encode(text), tokens.end]) == text


def test_tokenizer_without_a_kept_copy_is_the_file_of_the_spec_or_an_error(tmp_path):
    file = byte_level(tmp_path / "t.json")
    assert text_tokens_of(job(file), tmp_path / "checkpoints" / "step-3").end == 0
    with pytest.raises(DataError, match="the tokenizer of this job is not kept next to "):
        text_tokens_of(job("bpe"), tmp_path / "checkpoints" / "step-3")


def test_bytes_tokenizer_needs_no_file(tmp_path):
    assert text_tokens_of(spec(), tmp_path / "a" / "b").end is None
    ended = spec(data={"end_of_document": "<|endoftext|>"})
    assert text_tokens_of(ended, tmp_path / "a" / "b").end == 256
    assert text_tokens_of(ended, tmp_path / "a" / "b").decode([104, 105, 256]) == "hi"
