"""Rules of a JobSpec, and the vocabulary of its model."""

from __future__ import annotations

import copy
import difflib
import errno
import re
from typing import Any

import pytest
import yaml
from broken_specs import ALLOWED, RAMP, RULES, SETS
from engine_specs import document, problems_of, spec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from storage_away import away
from tokenizer_files import byte_level

from manta.workers.spec import batch_rules
from manta.workers.spec.problems import MAX_PROBLEMS, Problem, SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.spec.submitted import with_vocabulary


def follow(spec: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The document after one has put the suggestion where the path says."""
    result = copy.deepcopy(spec)
    *sections, key = problem.path.split(".")
    place = result
    for section in sections:
        place = place.setdefault(section, {})
    assert problem.suggestion is not None, problem
    value = yaml.safe_load(problem.suggestion)
    place[key] = float(value) if isinstance(value, str) and "e-" in value else value
    return result


@pytest.mark.parametrize(
    ("sections", "path", "rule", "suggestion"), [case[1:] for case in RULES], ids=[case[0] for case in RULES]
)
def test_a_broken_rule_is_reported_and_its_advice_works(sections, path, rule, suggestion):
    spec = document(**sections)
    (problem,) = problems_of(spec)
    assert problem.path == path
    assert rule in problem.rule
    assert problem.suggestion == suggestion
    assert not problem.unsupported
    assert problems_of(follow(spec, problem)) == []


@pytest.mark.parametrize(("sets", "path", "rule", "suggestion"), [case[1:] for case in SETS], ids=[c[0] for c in SETS])
def test_problem_of_a_validation_set_names_the_set(sets, path, rule, suggestion):
    problem = problems_of(document(data={"validation": sets}, train={"validate_every": 5}))[0]
    assert problem.path == path
    assert rule in problem.rule
    assert problem.suggestion == suggestion


def test_text_validation_beside_a_token_corpus_needs_its_tokenizer():
    sets = [{"name": "a", "paths": ["a"], "source": "megatron"}, {"name": "b", "paths": ["b"], "source": "jsonl"}]
    data = {"source": "megatron", "validation": sets}
    job = document(data=data, model={"vocabulary_size": 10_000}, train={"validate_every": 1})
    (problem,) = problems_of(job)
    assert (problem.path, problem.suggestion) == ("data.validation.1.source", "megatron")
    assert "the texts of b need the tokenizer that made the corpus's tokens" in problem.rule
    sets[1]["source"] = "megatron"
    assert problems_of(job) == []


def test_spec_with_an_automatic_layout_is_refused_with_advice_to_plan():
    (problem,) = problems_of({**document(), "parallel": "auto"})
    assert (problem.path, problem.unsupported) == ("parallel", True)
    assert "manta plan" in problem.rule
    assert problems_of(follow({**document(), "parallel": "auto"}, problem)) == []


@pytest.mark.parametrize("sections", [case[1] for case in ALLOWED], ids=[case[0] for case in ALLOWED])
def test_specs_at_the_limits_of_the_rules_are_accepted(sections):
    assert problems_of(document(**sections)) == []


def test_interleaved_schedule_needs_whole_turns_at_the_start_of_a_ramp():
    spec = document(parallel={"schedule": "interleaved", "pipeline": 2}, train={"batch_ramp": {**RAMP, "start": 5}})
    assert [problem.path for problem in problems_of(spec)] == ["train.batch_ramp.start", "train.batch_ramp.increment"]


small = st.integers(1, 24)


schedules = st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])


ramps = st.none() | st.fixed_dictionaries({"start": small, "increment": small, "samples": st.integers(1, 500)})


@settings(max_examples=100, deadline=None)
@given(
    model=st.fixed_dictionaries({"layers": small, "heads": small, "kv_heads": small, "sequence_length": small}),
    width=small,
    train=st.fixed_dictionaries(
        {
            "micro_batch_size": small,
            "global_batch_size": small,
            "batch_ramp": ramps,
            "deterministic": st.sampled_from(["layout", "elastic"]),
        }
    ),
    axes=st.fixed_dictionaries(
        {
            **dict.fromkeys(("tensor", "pipeline", "data", "context"), small),
            "context_method": st.sampled_from([None, "all_gather", "all_to_all", "ring"]),
            "context_order": st.sampled_from([None, "zigzag", "contiguous"]),
            "expert": st.none() | small,
        }
    ),
    moe=st.none()
    | st.fixed_dictionaries(
        dict.fromkeys(("experts", "per_token", "ffn_hidden_size", "first_dense", "groups", "groups_per_token"), small)
    ),
    least=st.none() | small,
    schedule=schedules,
    virtual_stages=st.integers(1, 4),
    stage_layers=st.none() | st.lists(small, min_size=1, max_size=4),
    split=st.sampled_from([None, True, False]),
    most=st.none() | small,
)
@example(  # one mistake after the other
    model={"layers": 1, "heads": 3, "kv_heads": 3, "sequence_length": 1},
    width=1,
    train={
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "batch_ramp": {"start": 1, "increment": 1, "samples": 1},
        "deterministic": "layout",
    },
    axes={"tensor": 3, "pipeline": 2, "data": 2},
    moe=None,
    least=None,
    schedule="gpipe",
    virtual_stages=2,
    stage_layers=[1, 1],
    split=True,
    most=1,
)
def test_following_the_advice_always_leads_to_a_spec(
    model, width, train, axes, moe, least, schedule, virtual_stages, stage_layers, split, most
):
    model = {**model, "hidden_size": 8 * width, "family": "llama" if moe else "gpt", "moe": moe}
    layout = {**axes, "schedule": schedule, "virtual_stages": virtual_stages, "sequence_parallel": split}
    layout["stage_layers"] = stage_layers
    spec = document(model=model, train=train, parallel=layout, elastic={"min_data": least, "max_data": most})
    for _ in range(30):  # more than there are keys that advice may change
        problems = problems_of(spec)
        if not problems:
            return
        spec = follow(spec, problems[0])
    raise AssertionError(f"still wrong: {problems}")


@pytest.mark.parametrize("deterministic", ["layout", "elastic"])
@pytest.mark.parametrize(
    ("schedule", "pipeline", "batch"), [("1f1b", 2, 7), ("interleaved", 1, 7), ("interleaved", 2, 12)]
)
def test_elastic_maximum_is_limited_by_the_first_invalid_size(schedule, pipeline, batch, deterministic):
    def of(data: int, most: int) -> dict[str, Any]:
        layout = {"schedule": schedule, "pipeline": pipeline, "data": data}
        train = {"global_batch_size": batch, "deterministic": deterministic}
        return document(train=train, parallel=layout, elastic={"max_data": most})

    sizes = range(1, batch + 3)
    first_broken = next(size for size in sizes if problems_of(of(size, size)))
    assert [most for most in sizes if not problems_of(of(1, most))] == list(range(1, first_broken))


def test_elastic_bounds_of_many_replicas_are_checked_with_few_evaluations(monkeypatch):
    looked = []
    rule = batch_rules._every_replica_has_samples
    monkeypatch.setattr(batch_rules, "_every_replica_has_samples", lambda spec: looked.append(spec) or rule(spec))
    for schedule in ("1f1b", "interleaved"):
        layout = {"schedule": schedule, "pipeline": 2}
        most = {"train": {"global_batch_size": 100_000}, "elastic": {"max_data": 100_000}}
        problems_of(document(parallel=layout, **most))
    assert len(looked) < 20


@given(
    st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["cosine", "linear", "wsd", "inverse-sqrt", "constant"]),
            "warmup_steps": st.integers(0, 40),
            "decay_steps": st.none() | st.integers(1, 40),
            "decay_fraction": st.none() | st.floats(1e-9, 1.0),
            "decay_shape": st.sampled_from(["linear", "1-sqrt"]),
        }
    )
)
def test_following_the_advice_about_learning_rates_leads_to_a_spec(optimizer):
    spec = document(train={"optimizer": optimizer})
    for _ in range(6):  # more than there are keys that advice may change
        problems = problems_of(spec)
        if not problems:
            return
        spec = follow(spec, problems[0])
    raise AssertionError(f"still wrong: {problems}")


def test_spec_with_thousands_of_unknown_keys_has_few_problems_and_their_count(monkeypatch):
    """To look for near names takes milliseconds each."""
    compared = []
    close = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *given, **how: compared.append(1) or close(*given, **how))
    with pytest.raises(SpecError) as refused:
        parse_job_spec({**{f"k{number}": 1 for number in range(3000)}, "\x1b]0;title\a" + "x" * 1000: 1})
    *described, more = refused.value.problems
    assert len(described) == MAX_PROBLEMS and more.rule.endswith("more problems, once these are fixed")
    assert len(compared) <= 2 * MAX_PROBLEMS


def test_unknown_spec_key_is_shown_printable_and_short():
    with pytest.raises(SpecError) as refused:
        parse_job_spec({"\x1b]0;title\a" + "x" * 1000: 1, None: 1})
    paths = [problem.path for problem in refused.value.problems]
    assert any(path.startswith("\\x1b]0;title\\x07xxx") and path.endswith(" ...") for path in paths)
    assert all(path.isprintable() and len(path) <= 60 for path in paths)


def job(file, model=None, **data):
    return spec(data={"tokenizer": str(file), **data}, model=model or {})


def test_vocabulary_size_is_read_from_the_tokenizers_file_and_kept_in_the_spec(tmp_path):
    file = byte_level(tmp_path / "t.json")
    plain = job(file)
    with pytest.raises(ValueError, match=r"not known before the tokenizer's file is read"):
        plain.vocabulary_size  # noqa: B018
    resolved = with_vocabulary(plain)
    assert resolved.vocabulary_size == resolved.data.tokenizer_vocabulary == 400
    file.unlink()
    again = parse_job_spec(resolved.model_dump(mode="json"))
    assert again.vocabulary_size == 400
    assert with_vocabulary(again) == again, "where it runs the file is looked at again"


def test_vocabulary_size_of_bytes_and_bpe_needs_no_file():
    assert with_vocabulary(spec()).vocabulary_size == 256
    assert spec(data={"tokenizer": "bpe"}).vocabulary_size == 8192
    assert spec(data={"tokenizer": "bpe", "tokenizer_vocabulary": 600}).vocabulary_size == 600
    assert spec(data={"end_of_document": "<|endoftext|>"}).vocabulary_size == 257


def test_vocabulary_of_a_model_may_be_larger_than_the_tokenizers_but_not_smaller(tmp_path):
    file = byte_level(tmp_path / "t.json")
    assert with_vocabulary(job(file, {"vocabulary_size": 512})).vocabulary_size == 512
    with pytest.raises(SpecError, match=r"vocabulary_size .300. is smaller than the tokenizer's .400."):
        with_vocabulary(job(file, {"vocabulary_size": 300}))


def test_vocabulary_size_other_than_the_tokenizer_files_is_refused(tmp_path):
    file = byte_level(tmp_path / "t.json")
    with pytest.raises(SpecError, match=r"tokenizer_vocabulary is 500, but .* has 400 token ids"):
        with_vocabulary(job(file, tokenizer_vocabulary=500))


def test_a_file_that_cannot_be_read_is_a_problem_of_the_spec(tmp_path):
    with pytest.raises(
        SpecError, match=r"data.tokenizer: no tokenizer can be read from .*: name bytes, bpe, a tokenizer.json or"
    ):
        with_vocabulary(job(tmp_path / "gone.json"))
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(SpecError, match=r"none.json is not a tokenizer.json"):
        with_vocabulary(job(tmp_path / "none.json", tokenizer_vocabulary=400))
    byte_level(tmp_path / "t.json", special=["<pad>"])
    with pytest.raises(SpecError, match=r"no special token that is known to end a document"):
        with_vocabulary(job(tmp_path / "t.json"))


def test_tokenizer_file_on_a_broken_mount_is_refused_as_unreadable_for_now(tmp_path):
    file = byte_level(tmp_path / "t.json")
    with away(tmp_path), pytest.raises(SpecError) as caught:
        with_vocabulary(job(file))
    (problem,) = caught.value.problems
    assert problem.rule.startswith(f"{file} cannot be read on ") and problem.rule.endswith(
        "; submit the job again then"
    )
    known = job(file, tokenizer_vocabulary=400)
    with away(tmp_path):
        assert with_vocabulary(known) == known, "it is read where the job runs"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_tokenizer_file_missing_here_is_accepted_if_the_vocabulary_size_is_known(tmp_path, number):
    file = byte_level(tmp_path / "t.json")
    known = job(file, tokenizer_vocabulary=400)
    with away(tmp_path, number):
        assert with_vocabulary(known) == known
        with pytest.raises(SpecError, match=r"data.tokenizer: no tokenizer can be read from"):
            with_vocabulary(job(file))


@pytest.mark.parametrize("name", ["x" * 300 + ".json", "x" * 300])
def test_a_name_that_no_file_can_have_is_a_problem_of_the_spec(tmp_path, name):
    with pytest.raises(SpecError, match=r"data.tokenizer: no tokenizer can be read from .*File name too long"):
        with_vocabulary(job(tmp_path / name, tokenizer_vocabulary=400))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "did you mean train.optimizer.learning_rate?"),
        ("gradient_accumulation_steps", "did you mean train.global_batch_size?"),
        ("micro-batch-size", "did you mean train.micro_batch_size?"),
        ("turbo", "known are steps, global_batch_size, "),
    ],
)
def test_unknown_key_is_answered_with_the_one_that_is_meant_or_all(key, meant):
    with pytest.raises(SpecError, match=re.escape(f"train.{key}: unknown key; {meant}")):
        spec(train={key: 1})


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("num_experts", "; did you mean model.moe.experts?"),
        ("moe_layer_freq", "; did you mean model.moe.every?"),
        ("capacity_factor", ": every token goes to all experts chosen for it; which tokens a capacity drops would"),
    ],
)
def test_key_of_experts_in_other_programs_is_answered_with_ours_or_why_there_is_none(key, answer):
    with pytest.raises(SpecError, match=re.escape(f"model.moe.{key}: unknown key{answer}")):
        spec(model={"moe": {"experts": 4, "per_token": 2, "ffn_hidden_size": 16, key: 1}})
