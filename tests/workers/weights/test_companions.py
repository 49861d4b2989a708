"""The tokenizer beside exported weights is the one that the job was trained with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engine_specs import document

from manta.workers.config import JobSpec
from manta.workers.data.tokenizer import MAX_BYTES
from manta.workers.errors import WeightsError
from manta.workers.weights.companions import add_tokenizer, byte_tokenizer, companion_files


def added(folder: Path, **data: str) -> dict[str, str]:
    """Names and texts of the files that are added for a checkpoint of a job with such data."""
    (folder / "out").mkdir(parents=True)
    (folder / "checkpoints" / "step").mkdir(parents=True, exist_ok=True)
    add_tokenizer(JobSpec.model_validate(document(data=data)), folder / "checkpoints" / "step", folder / "out")
    return {path.name: path.read_text() for path in (folder / "out").iterdir()}


def test_byte_tokenizer_is_written_beside_exported_weights(tmp_path):
    made = added(tmp_path)
    assert json.loads(made["tokenizer.json"]) == byte_tokenizer()
    assert json.loads(made["tokenizer_config.json"]) == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_exported_model_generates_until_the_end_of_document_token(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = added(tmp_path, end_of_document="<|endoftext|>")
    spec = JobSpec.model_validate(document(data={"end_of_document": "<|endoftext|>"}, model={"family": "llama"}))
    beside = companion_files(spec, "float32", tmp_path / "checkpoints" / "step")
    assert json.loads(beside["config.json"])["eos_token_id"] == 256
    assert json.loads(beside["generation_config.json"])["eos_token_id"] == 256
    assert json.loads(made["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == spec.vocabulary_size
    assert tokenizer.encode("a<|endoftext|>") == [97, 256]


def test_exported_model_has_no_end_token_if_none_is_known(tmp_path):
    for data in ({}, {"end_of_document": "none"}, {"source": "chat", "template": "chatml"}):
        spec = JobSpec.model_validate(document(data=data, model={"family": "llama"}))
        beside = companion_files(spec, "float32", tmp_path / "checkpoints" / "step")
        assert json.loads(beside["config.json"])["eos_token_id"] is None


@pytest.mark.parametrize("folder", ["checkpoints", "."])
@pytest.mark.parametrize("tokenizer", ["bpe", "a file that is gone"])
def test_exported_tokenizer_is_the_one_kept_beside_the_checkpoint(tmp_path, folder, tokenizer):
    (tmp_path / "checkpoints" / "step").mkdir(parents=True)
    (tmp_path / folder / "tokenizer.json").write_text("kept")
    (tmp_path / "out").mkdir()
    spec = JobSpec.model_validate(document(data={"tokenizer": tokenizer}))
    add_tokenizer(spec, tmp_path / "checkpoints" / "step", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "kept"


def test_export_copies_the_files_beside_a_named_tokenizer(tmp_path):
    source = tmp_path / "llama"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text(name)
    made = added(tmp_path, tokenizer=str(source))
    assert made == {name: name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}


def test_exported_tokenizer_file_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.json").touch()
    os.truncate(tmp_path / "vocab.json", MAX_BYTES + 1)
    with pytest.raises(
        WeightsError, match=r"vocab\.json cannot be read: it has \d+ bytes or more, and at most 67108864"
    ):
        added(tmp_path, tokenizer=str(tmp_path))
    assert not (tmp_path / "out" / "vocab.json").exists()


def test_export_prefers_the_kept_chat_template_to_the_tokenizers(tmp_path):
    source = tmp_path / "llama"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "chat.json").write_text('{"template": "kept", "tokens": {}, "name": "a"}')
    assert added(tmp_path, tokenizer=str(source))["chat_template.jinja"] == "kept"


def test_exported_weights_without_a_known_tokenizer_have_none(tmp_path):
    assert added(tmp_path, source="megatron") == {}
    assert added(tmp_path / "other", tokenizer=str(tmp_path / "nowhere")) == {}
