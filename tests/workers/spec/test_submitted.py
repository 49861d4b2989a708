"""Documents of jobs: changes, environment, numbers that fit, and what is added to them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from engine_specs import document
from hypothesis import given
from hypothesis import strategies as st
from storage_away import away

from manta.workers.data.roots import DataRoots
from manta.workers.spec.changes import changes_in, combinations_in, with_changes
from manta.workers.spec.divisors import nearest_divisor, nearest_multiple
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import document_in, parse_job_spec
from manta.workers.spec.rules import ALLOWED
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


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (None, (1e-5, 1e-6)),
        ({"beta1": 0.8}, (1e-5, 1e-6)),
        ({"learning_rate": 2e-5}, (2e-5, 2e-6)),
        ({"learning_rate": 5e-4}, (5e-4, 1e-4)),
        ({"learning_rate": 2e-5, "min_learning_rate": 0.0}, (2e-5, 0.0)),
    ],
)
def test_learning_rates_left_out_are_those_for_fine_tuning_with_weights_only(folder, given, rates):
    document = job(folder)
    document["train"] |= {} if given is None else {"optimizer": given}
    optimizer = parse_job_spec(with_shape_of_weights(document)).train.optimizer
    assert (optimizer.learning_rate, optimizer.min_learning_rate) == pytest.approx(rates)


@pytest.mark.parametrize(("given", "rates"), [({}, (2e-4, 1e-4)), ({"learning_rate": 1e-3}, (1e-3, 1e-4))])
def test_learning_rate_left_out_is_higher_for_adapters(folder, given, rates):
    document = job(folder)
    document["train"] |= {"lora": {}, "optimizer": given}
    spec = parse_job_spec(with_shape_of_weights(document))
    assert (spec.train.optimizer.learning_rate, spec.train.optimizer.min_learning_rate) == pytest.approx(rates)
    assert parse_job_spec(spec.model_dump(mode="json")) == spec


def test_mistyped_key_beside_weights_is_suggested():
    with pytest.raises(SpecError, match=r"model.form: unknown key; did you mean model.from\?"):
        parse_job_spec({"model": {"form": "there"}, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})


def test_spec_without_weights_is_unchanged():
    for unchanged in ({}, [], {"model": 3}, {"model": {"layers": 2}}, {"model": {"from": 3}}, {"model": {"from": ""}}):
        assert with_shape_of_weights(unchanged) is unchanged


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
        assert path == "model.from" and "cannot be blank or contain a null byte" in rule
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


DOCUMENT = {
    "name": "a",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib", "validation": [{"name": "one"}, {"name": "two"}]},
    "train": {"steps": 10, "optimizer": {"beta1": 0.8}},
    "parallel": "auto",
}


def test_spec_changes_are_parsed_as_in_a_file():
    before = copy.deepcopy(DOCUMENT)
    texts = "train.steps=7 train.optimizer.learning_rate=1e-3 elastic.min_data=1 parallel.data=2 data.validation=[]"
    changed = with_changes(DOCUMENT, changes_in([*texts.split(), "name=b=c", "labels={a: b}", "name=b"]))
    assert before == DOCUMENT
    assert changed["train"] == {"steps": 7, "optimizer": {"beta1": 0.8, "learning_rate": 0.001}}
    assert (changed["elastic"], changed["parallel"]) == ({"min_data": 1}, {"data": 2})
    assert (changed["name"], changed["labels"]) == ("b", {"a": "b"})
    assert parse_job_spec(changed).train.steps == 7


def test_number_in_a_spec_change_is_an_index_of_a_list():
    changed = with_changes(DOCUMENT, {"data.validation.1.name": "three"})
    assert changed["data"]["validation"] == [{"name": "one"}, {"name": "three"}]
    for key in ("2", "x", "-1"):
        with pytest.raises(SpecError, match=rf"^data.validation.{key}.name: {key} is not an index of a list of 2"):
            with_changes(DOCUMENT, {f"data.validation.{key}.name": "three"})


def test_mapping_without_spaces_after_its_colons_is_refused_with_what_was_meant():
    with pytest.raises(SpecError, match=r"^parallel: YAML needs a space .*\(try: \{tensor: 2, data: 1\}\)$"):
        changes_in(["parallel={tensor:2, data:1}"])
    assert changes_in(["a={b: c:d}", "e=f:g"]) == {"a": {"b": "c:d"}, "e": "f:g"}


def test_rules_across_fields_are_reported_with_unknown_and_missing_keys():
    laid_out = with_changes(DOCUMENT, {"parallel": {}, "data.validation": []})
    with pytest.raises(SpecError) as refused:
        parse_job_spec(with_changes(laid_out, {"model.heads": 5, "train.lr": 1, "modle": {}, "model.layers": "x"}))
    paths = {problem.path for problem in refused.value.problems}
    assert paths == {"model.heads", "train.lr", "modle", "model.layers"}
    with pytest.raises(SpecError) as refused:
        parse_job_spec(with_changes(laid_out, {"model.heads": 5, "model.hidden_size": "x"}))
    assert [each.path for each in refused.value.problems] == ["model.hidden_size"], "which the rule is about, too"


def test_spec_change_of_an_unknown_key_is_refused_as_in_a_file():
    with pytest.raises(SpecError, match=r"^train.stepps: unknown key; did you mean train.steps\?$"):
        parse_job_spec(with_changes(DOCUMENT, changes_in(["parallel={}", "data.validation=[]", "train.stepps=3"])))


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", ".=3", ""])
def test_malformed_spec_change_is_refused(text):
    with pytest.raises(SpecError, match=r"is not KEY=VALUE \(try: train.steps=100\)"):
        changes_in([text])


@pytest.mark.parametrize("value", ["[", "2020-13-45", "a: b: c", "'"])
def test_invalid_value_of_a_spec_change_is_reported_with_its_key(value):
    with pytest.raises(SpecError, match=r"^train.steps: .* is not a valid YAML value"):
        changes_in([f"train.steps={value}"])


@pytest.mark.parametrize("document", [None, [], "text"])
def test_spec_changes_leave_a_document_that_is_no_mapping_unchanged(document):
    assert with_changes(document, {"train.steps": 3}) == document


def test_sweep_is_every_combination_of_its_values():
    changes = combinations_in(["train.steps=1,2", "data.paths=[a, b],[c]"])
    steps, paths = [1, 1, 2, 2], [["a", "b"], ["c"]] * 2
    assert changes == [{"train.steps": a, "data.paths": b} for a, b in zip(steps, paths, strict=True)]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["a=1,2", "a=3"], "a: is swept twice"),
        (["a="], "a: has no values to sweep over"),
        (["a=1,[2"], "a: .* is not a valid YAML value"),
        ([f"{key}={','.join(map(str, range(11)))}" for key in "ab"], "121 combinations; .* at most 100"),
        (["a"], "is not KEY=VALUE"),
    ],
)
def test_malformed_sweep_is_refused_with_a_reason(texts, why):
    with pytest.raises(SpecError, match=why):
        combinations_in(texts)


@given(st.integers(1, 400), st.integers(1, 500))
def test_nearest_divisor_of_a_number_is_found(of, to):
    expected = min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - to), d))
    assert nearest_divisor(of, to) == expected


def test_nearest_divisor_of_a_large_number_is_found_at_once():
    assert nearest_divisor(10**12, 999_983) == 10**6
    assert nearest_divisor(999_999_999_989, 1000) == 1  # a prime


@given(st.integers(1, 50), st.integers(1, 10**30))
def test_nearest_multiple_of_a_number_is_found(of, to):
    near = nearest_multiple(of, to)
    assert near > 0
    assert near % of == 0
    assert abs(near - to) * 2 <= of or near == of


PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"


def environment(**variables):
    return document() | {"resources": {"environment": variables}}


def test_allowed_environment_variables_are_kept_and_distinguish_specs():
    one = parse_job_spec(environment(NCCL_SOCKET_IFNAME="eth1"))
    assert one.resources.environment == {"NCCL_SOCKET_IFNAME": "eth1"}
    assert len({one, parse_job_spec(environment(NCCL_SOCKET_IFNAME="eth2")), parse_job_spec(document())}) == 3
    assert parse_job_spec(one.model_dump(mode="json")) == one


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("NCCL_NET_PLUGIN", None), ("NCCL_DEBUG_FILE", "NCCL_DEBUG"), ("NCCL_TOPO_DUMP_FILE", None),
        ("LD_PRELOAD", None), ("CUDA_VISIBLE_DEVICES", None), ("nccl_algo", "NCCL_ALGO"), ("MANTA_HOME", None),
    ],
)  # fmt: skip
def test_environment_variables_that_are_not_allowed_are_refused_by_name(name, suggestion):
    with pytest.raises(SpecError) as refused:
        parse_job_spec(environment(**{name: "x"}))
    (problem,) = refused.value.problems
    assert problem.path == f"resources.environment.{name}"
    assert "listed in docs/parallelism.md" in problem.rule
    if suggestion is not None:
        assert problem.suggestion == suggestion


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "x" * 1001])
def test_values_are_such_that_a_process_can_be_given(value):
    with pytest.raises(SpecError, match=r"resources\.environment\.NCCL_ALGO: a value may have at most 1000 characters"):
        parse_job_spec(environment(NCCL_ALGO=value))


def test_allowed_environment_variables_name_no_file_or_library():
    assert not [name for name in ALLOWED if re.search("FILE|PLUGIN|PATH|DIR|_LIB|PRELOAD", name)]


def test_allowed_environment_variables_are_all_documented():
    section = PAGE.read_text().partition("## Environment variables of a job")[2].partition("\n## ")[0]
    paragraph = section.rpartition(":\n")[2]
    assert set(re.findall("`([A-Z0-9_]+)`", paragraph)) == ALLOWED
