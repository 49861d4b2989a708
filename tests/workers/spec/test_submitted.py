"""`model: {from: FOLDER}`: the shape is filled in once, and what is said beside it has to agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from storage_away import away

from manta.workers.data.roots import DataRoots
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import document_in, parse_job_spec
from manta.workers.spec.submitted import with_shape_of_weights

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def job(folder: Path | str, **model) -> dict:
    return {
        "model": {"from": str(folder), **model},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1},
    }


def problems(document: dict, roots: DataRoots | None = None) -> list[tuple[str, str, str | None]]:
    with pytest.raises(SpecError) as caught:
        with_shape_of_weights(document, *([roots] if roots else []))
    return [(each.path, each.rule, each.suggestion) for each in caught.value.problems]


def test_the_shape_is_that_of_the_folder_and_stays_with_the_spec(folder):
    spec = parse_job_spec(with_shape_of_weights(job(folder, dropout=0.1)))
    model = spec.model
    assert (model.family, model.layers, model.heads, model.kv_heads, model.ffn_size) == ("llama", 3, 4, 2, 48)
    assert (model.sequence_length, model.vocabulary_size, model.dropout) == (64, 300, 0.1)
    stored = spec.model_dump(mode="json")
    assert stored["model"]["from"] == str(folder)
    (folder / "config.json").unlink()
    assert parse_job_spec(stored) == spec, "the stored spec needs no folder to be read"


def test_a_stored_spec_can_be_submitted_again(folder):
    stored = parse_job_spec(with_shape_of_weights(job(folder, dropout=0.1))).model_dump(mode="json")
    assert parse_job_spec(with_shape_of_weights(stored)) == parse_job_spec(stored)


def test_mistyped_key_beside_weights_is_suggested():
    with pytest.raises(SpecError, match=r"model.form: unknown key \(try: from\)"):
        parse_job_spec({"model": {"form": "there"}, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})


def test_spec_without_weights_is_unchanged():
    for document in ({}, [], {"model": 3}, {"model": {"layers": 2}}, {"model": {"from": 3}}, {"model": {"from": ""}}):
        assert with_shape_of_weights(document) is document


def test_keys_beside_weights_may_repeat_their_shape(folder):
    same = {"family": "llama", "layers": 3, "heads": 4, "rope": {"theta": 10000.0}, "bias": False, "head_dim": 8}
    assert parse_job_spec(with_shape_of_weights(job(folder, sequence_length=16, **same))).model.sequence_length == 16


@pytest.mark.parametrize(
    ("model", "path", "shown", "suggestion"),
    [
        ({"layers": 4}, "model.layers", "num_hidden_layers 3", "3"),
        ({"family": "gpt"}, "model.family", "model_type llama", "llama"),
        ({"tie_embeddings": True}, "model.tie_embeddings", "tie_word_embeddings false", "false"),
        ({"rope": {"theta": 2.0}}, "model.rope", "rope_scaling", None),
        ({"activation": "gelu_tanh"}, "model.activation", "a llama without it", "gelu"),
        ({"sequence_length": 65}, "model.sequence_length", "max_position_embeddings 64", "64"),
    ],
)
def test_keys_that_contradict_the_weights_are_named_with_their_config_file(folder, model, path, shown, suggestion):
    ((where, rule, advice),) = problems(job(folder, **model))
    assert where == path
    assert f"{folder}/config.json" in rule and shown in rule
    assert suggestion is None or advice == suggestion


def test_unknown_key_beside_model_from_is_reported(folder):
    with pytest.raises(SpecError, match="unknown key"):
        parse_job_spec(with_shape_of_weights(job(folder, layer=3)))


def test_weights_outside_the_data_roots_are_not_read(folder, tmp_path):
    elsewhere = DataRoots((tmp_path / "allowed",))
    ((path, rule, _),) = problems(job(folder), elsewhere)
    assert path == "model.from" and "MANTA_DATA_ROOTS" in rule
    (tmp_path / "allowed" / "link").mkdir(parents=True)
    (tmp_path / "allowed" / "link" / "config.json").symlink_to(folder / "config.json")
    ((path, rule, _),) = problems(job(tmp_path / "allowed" / "link"), elsewhere)
    assert path == "model.from" and "MANTA_DATA_ROOTS" in rule
    assert with_shape_of_weights(job(folder), DataRoots((folder,)))["model"]["layers"] == 3


def test_unusable_weights_folder_is_a_problem_of_model_from(tmp_path):
    ((path, rule, _),) = problems(job(tmp_path))
    assert path == "model.from" and f"{tmp_path} has no config.json" in rule
    ((path, rule, _),) = problems(job("s3://bucket/llama"))
    assert "copy the weights here first" in rule
    for name in ("a\0b", " "):
        ((path, rule, _),) = problems(job(name), DataRoots((tmp_path,)))
        assert path == "model.from" and "has no zero byte, and is not blank" in rule
    for name in ("x" * 5000, "\ud800", "."):
        assert problems(job(name))[0][0] == "model.from"


def test_a_relative_folder_is_beside_the_spec():
    text = "model: {from: weights}"
    assert document_in(text, "job.yaml", Path("/there"))["model"]["from"] == "/there/weights"
    assert document_in("model: {from: 's3://a'}", "job.yaml", Path("/there"))["model"]["from"] == "s3://a"


def test_weights_on_a_broken_mount_are_told_from_a_missing_folder(folder):
    with away(folder):
        ((path, rule, _),) = problems(job(folder))
    assert path == "model.from" and rule.startswith(f"{folder}/config.json cannot be read on ")
    assert rule.endswith("(Input/output error): its disk or mount has to work again there; submit the job again then")
    ((_, rule, _),) = problems(job(folder / "gone"))
    assert rule == f"there is no folder {folder / 'gone'}; if it should be there, is it mounted here?"
