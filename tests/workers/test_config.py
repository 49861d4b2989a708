"""The JobSpec: its sections, their rules and defaults."""

from __future__ import annotations

import copy
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_specs import TINY, document, problems_of, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.spec.problems import _OTHER_NAMES, Problem, SpecError, _all_paths
from manta.workers.spec.reading import load_job_spec, parse_job_spec, read_document, with_absolute_paths


def with_value(path: str, value: Any) -> dict[str, Any]:
    """TINY with one value set, or taken out (None)."""
    spec = copy.deepcopy(TINY)
    *sections, key = path.split(".")
    place = spec
    for section in sections:
        place = place.setdefault(section, {})
    if value is None:
        place.pop(key, None)
    else:
        place[key] = value
    return spec


def advised(spec: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The document after one has followed the suggestion."""
    assert problem.suggestion is not None
    *sections, key = problem.path.split(".")
    result = copy.deepcopy(spec)
    place = result
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = yaml.safe_load(problem.suggestion)
    return result


def test_contract_example_parses_with_its_values():
    spec = parse_job_spec(
        yaml.safe_load("""
name: quickstart
model:     {family: gpt, layers: 4, hidden_size: 128, heads: 4, sequence_length: 128}
data:      {source: python-stdlib, tokenizer: bytes}
train:     {steps: 200, global_batch_size: 16, micro_batch_size: 2, seed: 1234, precision: fp32,
            optimizer: {name: adamw, learning_rate: 1.0e-3, min_learning_rate: 1.0e-4, schedule: cosine,
                        warmup_steps: 20, weight_decay: 0.1, beta1: 0.9, beta2: 0.95, epsilon: 1.0e-8, clip_norm: 1.0}}
parallel:  {tensor: 2, pipeline: 2, data: 2, virtual_stages: 1, schedule: 1f1b, sequence_parallel: true,
            recompute: selective, zero: 1}
elastic:   {min_data: 1, max_data: 2}
resources: {accelerator: auto}
checkpoint: {every_steps: 50, keep: 3}
recovery:  {max_restarts: 20}
priority:  0
""")
    )
    assert (spec.layout.world_size, spec.micro_batches, spec.vocabulary_size) == (8, 4, 256)
    assert spec.train.optimizer.epsilon == 1e-8


def test_job_spec_has_defaults_for_all_but_model_data_and_steps():
    spec = parse_job_spec({"model": TINY["model"], "data": TINY["data"], "train": {"steps": 1}})
    assert spec.parallel == ParallelConfig(tensor=1, pipeline=1, data=1, schedule="1f1b", recompute="none", zero=1)


@pytest.mark.parametrize(("tensor", "asked", "on"), [(1, None, False), (2, None, True), (2, False, False)])
def test_sequence_parallelism_is_on_exactly_with_tensor_parallelism(tensor, asked, on):
    parallel = {"tensor": tensor} | ({} if asked is None else {"sequence_parallel": asked})
    assert parse_job_spec(document(parallel=parallel)).layout.sequence_parallel_on is on


def test_job_duration_is_unlimited_by_default():
    assert parse_job_spec(document()).max_duration is None
    assert parse_job_spec({**document(), "max_duration": 90}).max_duration == 90.0
    with pytest.raises(SpecError, match="max_duration: must be above 0"):
        parse_job_spec({**document(), "max_duration": 0})


@pytest.mark.parametrize(
    ("nonfinite", "spike", "needs"),
    [("fail", "ignore", False), ("skip", "ignore", False), ("fail", "skip", True), ("roll_back", "ignore", True)],
)
def test_numerics_history_is_kept_only_for_policies_that_need_it(nonfinite, spike, needs):
    recovery = {"nonfinite": nonfinite, "spike": {"policy": spike, "window": 5}}
    assert parse_job_spec({**document(), "recovery": recovery}).recovery.needs_history is needs


def test_a_parsed_spec_parses_again_to_the_same():
    spec = parse_job_spec(document(parallel={"tensor": 2, "recompute": "selective"}))
    assert parse_job_spec(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


WRONG_VALUES = [
    ("model.layers", "4", "must be an integer, not a string ('4')", "4"),
    ("model.layers", 4.2, "must be an integer", "4"), ("model.layers", 4.7, "must be an integer", "5"),
    ("model.layers", True, "must be an integer, not a boolean", "4"),
    ("model.layers", "four", "must be an integer, not a string ('four')", "4"),
    ("model.layers", 0, "must be above 0, not 0", "1"), ("model.layers", -3.7, "must be an integer", None),
    ("model.layers", 10**12, "must be at most 10000", "10000"),
    ("model.hidden_size", 10**12, "must be at most 1000000", "1000000"),
    ("model.bias", "yes", "must be true or false", "true"), ("model.dropout", 1.0, "must be below 1", "0.0"),
    ("model.family", "gtp", "must be one of gpt, llama, qwen, deepseek, custom, not 'gtp'", "gpt"),
    ("train.optimizer.learning_rate", -1.0, "must be above 0", "0.001"),
    ("train.optimizer.learning_rate", 0, "must be above 0", "0.001"),
    ("train.batch_ramp", 3, "must be a mapping", "{start: 4, increment: 4, samples: 1000}"),
    ("train.optimizer.learning_rate", "0.1", "must be a number", "0.1"),
    ("train.optimizer.learning_rate", math.nan, "must be a finite number", "0.001"),
    ("train.optimizer.beta1", 1.5, "must be below 1", "0.9"),
    ("train.steps", 10**400, "must be at most 1000000000", "1000000000"),
    ("train.global_batch_size", 10**30, "must be at most 100000000", "100000000"),
    ("parallel.tensor", 10**9, "must be at most 100000", "100000"),
    ("parallel.zero", 4, "must be one of 0, 1, 2, 3, not 4", "3"),
    ("parallel.recompute", {"a": "b"}, "must be one of none, selective, full, not a mapping", None),
    ("data.paths", "corpus.txt", "must be a list", "[corpus.txt]"),
    ("name", "../up", "must be letters, digits", "up"), ("name", 7, "must be a string", "'7'"),
    ("name", "", "must have at least 1 character", "my-model"),
    ("name", "n" * 101, "must have at most 100 characters", "my-model"),
    ("max_duration", "1h", "must be a number, not a string ('1h')", "3600"),
    ("elastic", True, "must be a mapping, not a boolean", "{min_data: 1, max_data: 2}"),
    ("labels", ["a"], "must be a mapping, not a list", "{team: research}"),
    ("labels.team", 1, "must be a string, not an integer (1): in quotes it stays as it was written", "'1'"),
    ("labels.team", 1.1, "must be a string, not a number (1.1): in quotes it stays as it was written", None),
    ("labels.team", date(2026, 1, 2), "must be a string, not a date: in quotes it stays as it was written", None),
    ("labels.team", True, "must be a string, not a boolean (True): without quotes yes, no, on, off", "'yes'"),
    ("name", False, "are booleans in YAML", "'no'"), ("priority", 5000, "must be at most 1000", "1000"),
    ("train", 5, "must be a mapping, not an integer (5)", None),
    ("labels.team", "a & b", "must be letters, digits, '.', '_' or '-', the first and the last", "a---b"),
    ("parallel.bucket_megabytes", "x", "must be a number, not a string ('x')", "auto"),
    ("parallel.bucket_megabytes", -1, "must be above 0", "auto"),
    ("model.options", {"a": [1]}, "must be a number, a string, true or false, not a list", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "rule", "suggestion"), WRONG_VALUES, ids=[str(case[:2])[:50] for case in WRONG_VALUES]
)
def test_invalid_spec_value_names_its_key_rule_and_a_working_value(path, value, rule, suggestion):
    (problem,) = problems_of(with_value(path, value))
    assert problem.path == (f"{path}.a" if path == "model.options" else path)
    assert rule in problem.rule
    assert suggestion is None or problem.suggestion == suggestion
    if problem.suggestion is not None and path not in ("name", "elastic", "parallel.tensor"):
        parsed = advised(with_value(path, value), problem)
        assert not [other for other in problems_of(parsed) if other.path == path and not other.unsupported]


def test_entries_of_lists_are_told_what_there_is():
    (problem,) = problems_of(with_value("train.lora", {"targets": ["w"]}))
    assert problem == Problem("train.lora.targets.0", "must be one of q, k, v, o, gate, up, down, not 'w'", "down")
    (problem,) = problems_of(with_value("train.lora", {"targets": []}))
    assert problem.rule == "must have at least 1 entry"


def test_rope_base_whose_frequencies_do_not_fall_is_refused():
    """Yarn divides by the logarithm of their base."""
    problem, *_ = problems_of(with_value("model.rope", {"theta": 1.0}))
    assert problem == Problem("model.rope.theta", "must be above 1.0, not 1.0", "10000.0")


def test_short_text_values_have_a_rule_and_a_suggestion():
    (problem,) = problems_of(with_value("labels", {"Team!": "a"}))
    assert (problem.path, problem.suggestion) == ("labels.Team!", "Team")
    assert "optionally after a domain name" in problem.rule
    (problem,) = problems_of(with_value("parallel", {"stage_accelerators": ["A 100"]}))
    assert (problem.path, problem.suggestion) == ("parallel.stage_accelerators.0", "A-100")
    assert "must be a type as `manta nodes` shows it" in problem.rule
    (problem,) = problems_of(with_value("model.entrypoint", "mine"))
    assert problem == Problem("model.entrypoint", "must be package.module:function", "my_models.mine:build")


@pytest.mark.parametrize("value", ["../up", "", "a\nb", "日本", " x", "n" * 101])
def test_suggested_job_name_is_valid(value):
    (problem,) = problems_of(with_value("name", value))
    if problem.suggestion is not None:
        assert parse_job_spec(with_value("name", problem.suggestion)).name == problem.suggestion


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("model.layer", "model.layers"), ("model.hiden_size", "model.hidden_size"), ("train.optimizer.lr_rate", None),
        ("train.optimizer.learning_rte", "train.optimizer.learning_rate"),
        ("train.learning_rate", "train.optimizer.learning_rate"),
        ("modell", "model"), ("parallel.tensors", "parallel.tensor"), ("train.lr", "train.optimizer.learning_rate"),
        ("train.optimizer.lr", "train.optimizer.learning_rate"),
        ("train.batch_size", "train.global_batch_size"),
        ("batch_size", "train.global_batch_size"),
        ("parallel.TP", "parallel.tensor"), ("train.dtype", "train.precision"),
        ("model.n_layer", "model.layers"),
    ],
)  # fmt: skip
def test_unknown_spec_keys_are_reported_with_the_closest_known_ones(key, closest):
    (problem,) = problems_of(with_value(key, 1))
    assert (problem.path, problem.rule) == (key, "unknown key")
    if closest is not None:
        assert problem.suggestion == closest


def test_names_of_other_programs_lead_to_keys_that_exist():
    assert set(_OTHER_NAMES.values()) <= set(_all_paths(JobSpec, ""))


@pytest.mark.parametrize(
    "path", ["model", "data", "train", "model.layers", "model.heads", "data.source", "train.steps"]
)
def test_missing_spec_key_is_reported_with_an_example_that_works(path):
    spec = with_value(path, None)
    (problem,) = problems_of(spec)
    assert (problem.path, problem.rule) == (path, "required, but missing")
    parse_job_spec(
        {**advised(spec, problem), **({"data": {"source": "python-stdlib"}} if path == "data.source" else {})}
    )


def test_all_problems_of_a_spec_are_reported_at_once():
    paths = {problem.path for problem in problems_of(document(model={"layers": 0, "head": 3}, train={"steps": "x"}))}
    assert paths == {"model.layers", "model.head", "train.steps"}


def test_spec_error_has_all_problems_in_one_line():
    error = SpecError([Problem("a.b", "is wrong", "4"), Problem("c", "is bad"), Problem("", "is no spec")])
    assert str(error) == "a.b: is wrong (try: 4); c: is bad; is no spec"
    assert not error.problems[0].unsupported


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty: it must be a mapping of sections"),
        (b"# nothing but a comment\n", "is empty: it must be a mapping of sections"),
        (b"name: \xe9\n", "is not valid UTF-8 at byte 7"),
        (b"a: 1\na: 2\n", "is not valid YAML: duplicate key a at line 2, column 1"),
        (b"[" * 20_000, "is not valid YAML: it is nested too deeply"),
    ],
    ids=["empty", "comment", "latin", "twice", "deep"],
)
def test_file_without_a_spec_is_refused_with_the_reason(tmp_path, content, sentence):
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_document(file)
    assert caught.value.problems[0].rule == f"{file} {sentence}"


@pytest.mark.parametrize("value", [None, [], "text", 5, 1.5, True])
def test_a_spec_is_a_mapping(value):
    (problem,) = problems_of(value)
    assert "a job spec is a mapping of sections, not" in problem.rule


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["model", "data", "train", "parallel", "elastic", "name", "priority", "model.layers", "model.kv_heads",
     "model.vocabulary_size", "data.paths", "data.weights", "data.tokenizer", "train.batch_ramp", "train.optimizer",
     "train.optimizer.beta2", "parallel.zero", "parallel.schedule", "parallel.sequence_parallel", "elastic.min_data",
     "checkpoint.keep", "resources.accelerator", "nonsense", "model.nonsense"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(fields, json_values, max_size=4), json_values)
def test_anything_at_all_is_a_spec_or_a_spec_error(values, whole):
    spec = copy.deepcopy(TINY)
    for path, value in sorted(values.items()):
        *sections, key = path.split(".")
        place = spec
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[key] = value
    for candidate in (spec, whole):
        try:
            assert isinstance(parse_job_spec(candidate), JobSpec)
        except SpecError as error:
            assert error.problems
            assert all(isinstance(problem.rule, str) and problem.rule for problem in error.problems)
            assert all(len(problem.rule) < 300 for problem in error.problems)


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(TINY) + "\n")
    file.write_text(
        file.read_text().replace("steps: 30", "steps: 30\n  optimizer: {learning_rate: 1e-3, epsilon: 1E-8}")
    )
    optimizer = load_job_spec(file).train.optimizer
    assert (optimizer.learning_rate, optimizer.epsilon) == (1e-3, 1e-8)


def test_relative_paths_are_resolved_against_the_spec_files_folder(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "job.yaml"
    sets = [{"name": "code", "paths": ["code.txt"]}]
    data = {"paths": ["corpus.txt", "../more", "/etc/text"], "validation": sets}
    file.write_text(yaml.safe_dump(document(data=data, train={"validate_every": 5})))
    monkeypatch.chdir(tmp_path)
    paths = load_job_spec(Path("jobs/job.yaml")).data.paths
    assert [Path(path).resolve() for path in paths[:2]] == [tmp_path / "jobs" / "corpus.txt", tmp_path / "more"]
    assert all(Path(path).is_absolute() for path in paths)
    assert paths[2] == "/etc/text"
    (code,) = load_job_spec(Path("jobs/job.yaml")).data.validation
    assert code.paths == (str(tmp_path / "jobs" / "code.txt"),)


def test_words_and_urls_are_not_taken_for_relative_paths():
    named = {"paths": ["a", "s3://texts/a"], "tokenizer": "s3://llama", "template": "chatml"}
    absolute = with_absolute_paths({"data": named, "model": {"from": "s3://llama"}}, Path("/jobs"))
    assert absolute == {"data": {**named, "paths": ["/jobs/a", "s3://texts/a"]}, "model": {"from": "s3://llama"}}
    assert named["paths"] == ["a", "s3://texts/a"], "what was given stays"


NO_SPECS = {
    "open brace": b"model: {", "not UTF-8": b"\xff\xfe\x00", "unknown alias": b"a: *nobody",
    "no date": b"name: 2001-99-99", "a Python object": b"x: !!python/object:os.system {}",
    "nested aliases": b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1)
                                                    for n in range(1, 40)) + b"parallel: {recompute: *a39}",
    "a mapping as key": b"? {a: b}\n: c", "huge number": b"steps: " + b"9" * 5000, "deep": b"[" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("content", NO_SPECS.values(), ids=NO_SPECS)
def test_file_that_is_no_spec_is_named_in_one_line(tmp_path, content):
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_job_spec(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 10_000


def test_a_huge_number_in_another_base_is_refused(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("train: {steps: 0x" + "f" * 8000 + "}")
    with pytest.raises(SpecError, match="a number with 8002 characters; at most 1000 are allowed"):
        load_job_spec(file)


def test_missing_spec_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_document(tmp_path / "none.yaml")


@pytest.mark.parametrize(("value", "rule"), [(0, "must be above 0, not 0"), ("often", "must be an integer, not a")])
def test_invalid_number_that_may_be_auto_is_reported_once(value, rule):
    with pytest.raises(SpecError) as caught:
        spec(checkpoint={"snapshot_every_steps": value})
    (problem,) = caught.value.problems
    assert problem.path == "checkpoint.snapshot_every_steps"
    assert problem.rule.startswith(rule)
    assert spec(checkpoint={"snapshot_every_steps": "auto"}) == spec()


@pytest.mark.parametrize(
    ("value", "rule", "suggestion"),
    [
        (0, "must be above 0, not 0", "1"),
        (5000, "must be at most 1024, not 5000", "1024"),
        ("many", "must be an integer, not a string ('many')", "auto"),
    ],
)
def test_thread_count_of_a_spec_is_auto_or_between_1_and_1024(value, rule, suggestion):
    assert problems_of(with_value("resources.threads", value)) == [Problem("resources.threads", rule, suggestion)]
    assert spec().resources.threads == "auto"


def test_spec_problems_are_a_line_each_and_name_the_file_once():
    error = SpecError([Problem("model.heads", "must be at least 1, not 0", "1"), Problem("", "a.yaml is no YAML")])
    lines = ["a.yaml: model.heads: must be at least 1, not 0 (try: 1)", "a.yaml: is no YAML"]
    assert error.lines(Path("a.yaml")) == lines


DEFAULTS = """
name: job
model: {family: gpt, bias: true, tie_embeddings: true, activation: gelu, norm_epsilon: 1.0e-5}
data: {documents: together, tokenizer: bytes, validation_fraction: 0.05}
train: {global_batch_size: 16, micro_batch_size: 1, seed: 1234, deterministic: layout, precision: fp32, fp8: "off",
        attention: auto, validation_batches: 8, time_parts_every: 10, log_every: 10,
        optimizer: {name: adamw, learning_rate: 1.0e-3, min_learning_rate: 1.0e-4, schedule: cosine,
                    decay_shape: linear, weight_decay: 0.1, weight_decay_groups: [linear, embedding],
                    beta1: 0.9, beta2: 0.95, epsilon: 1.0e-8, clip_norm: 1.0}}
parallel: {tensor: 1, pipeline: 1, data: 1, context: 1, virtual_stages: 1, schedule: 1f1b, forward_chunks: 1,
           recompute: none, recompute_modules: [core_attention], recompute_every: 1, zero: 1, bucket_megabytes: auto,
           gather: after_update}
resources: {accelerator: auto, threads: auto}
checkpoint: {every_steps: 50, keep: 3, snapshots: auto, snapshot_every_steps: auto}
recovery: {nonfinite: fail, spike: {policy: ignore, window: 50, loss_deviations: 8.0, grad_norm_deviations: 20.0},
           roll_back_steps: 10, max_roll_backs: 10, check_replicas_every: 100, stragglers: report, max_restarts: 20,
           restart_window_seconds: 86400.0}
"""
"""Keys that are left out are off, none, or 0."""


def without_nothings(section: dict[str, Any]) -> dict[str, Any]:
    """`section` and those below it without keys whose value is off, none, 0 or empty."""
    parts = {key: without_nothings(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in parts.items() if value}


def test_a_job_whose_user_says_nothing_has_the_defaults():
    said = {section: TINY[section] for section in ("model", "data")} | {"train": {"steps": 1}}
    spec = parse_job_spec(said).model_dump(mode="json")
    for section, keys in said.items():
        for key in keys:
            del spec[section][key]
    assert without_nothings(spec) == yaml.safe_load(DEFAULTS)
