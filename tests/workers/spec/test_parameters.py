"""Names of parameters by arithmetic, and what patterns of them mean."""

from __future__ import annotations

import pytest
from engine_specs import document, problems_of, spec
from one_layer import lone_rank

from manta.workers.model.stage import ModelStage
from manta.workers.spec.parameters import (
    first_trained_layer,
    frozen_names,
    matching,
    needs_gradient,
    padded_rows,
    parameter_names,
)
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec

GPT = {"layers": 12, "tie_embeddings": False}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_embeddings": False, "kv_heads": 2, "bias": False},
        {"family": "llama", "kv_heads": 1, "bias": True, "tie_embeddings": True},
    ],
    ids=str,
)
def test_parameter_names_of_a_spec_are_those_of_the_engine(model):
    job = spec(model=model)
    names = [entry.name for entry in ModelStage(job, lone_rank(job)).named_shards()]
    assert sorted(parameter_names(job.model)) == sorted(names)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("embedding", ["embedding.token.weight", "embedding.position.weight"]), ("output", ["output.weight"]),
        ("layers.1.mlp.up", ["layers.1.mlp.up.weight", "layers.1.mlp.up.bias"]),
        ("layers.9-10.mlp.down.bias", ["layers.9.mlp.down.bias", "layers.10.mlp.down.bias"]),
        ("final_norm.weight", ["final_norm.weight"]),
        ("layers.1*.attention.qkv.bias", [f"layers.{layer}.attention.qkv.bias" for layer in (1, 10, 11)]),
        ("embed", []), ("layers.12-15", []), ("mlp", []), ("", []), ("layers.[1]", []),
    ],
)  # fmt: skip
def test_parameter_pattern_means_a_parameter_or_all_below_a_part(pattern, meant):
    assert matching(pattern, parameter_names(spec(model=GPT).model)) == meant


def test_parameter_pattern_takes_stars_for_parts_and_ranges_of_layers():
    names = parameter_names(spec(model=GPT).model)
    mlp = matching("*.mlp", names)
    assert len(mlp) == 12 * 4 and all(".mlp." in name for name in mlp)
    some = matching("layers.2-3", names)
    assert {name.split(".")[1] for name in some} == {"2", "3"}
    assert len(some) == 2 * len([name for name in names if name.startswith("layers.0.")])
    assert set(matching("*", names)) == set(names)


@pytest.mark.parametrize(
    ("frozen", "first"),
    [
        ([], -1), (["embedding.token"], -1), (["embedding"], 0), (["embedding", "layers.0-4"], 5),
        (["layers.0-4"], -1), (["embedding", "layers.0-4", "layers.5.attention"], 5), (["embedding", "layers"], 12),
    ],
)  # fmt: skip
def test_backward_ends_in_the_first_layer_that_is_trained(frozen, first):
    job = spec(model=GPT, train={"frozen": frozen})
    assert first_trained_layer(job) == first


def test_virtual_stages_before_the_first_trained_layer_take_no_gradient():
    """Four stages of three layers."""

    def takes(*frozen: str, **parallel) -> tuple[bool, ...]:
        return needs_gradient(spec(model=GPT, train={"frozen": frozen}, parallel={"pipeline": 4, **parallel}))

    assert takes() == (True,) * 4
    assert takes("layers") == (True,) * 4, "the embedding is trained"
    assert takes("embedding", "layers.0-4") == (False, True, True, True)
    assert takes("embedding", "layers.0-5") == (False, False, True, True)
    assert takes("embedding", "layers") == (False, False, False, True)
    assert takes("embedding", "layers.0-10", "output", "final_norm") == (False, False, False, True)
    assert takes("embedding", "layers.0-4", stage_layers=(5, 1, 3, 3)) == (False, True, True, True)
    assert takes("embedding", "layers.0-4", stage_layers=(6, 1, 2, 3)) == (True,) * 4
    two = {"virtual_stages": 2, "schedule": "zb-v", "pipeline": 2}
    assert takes("embedding", "layers.0-6", **two) == (False, False, True, True)


def problem_of(frozen: list[str], **model):
    with pytest.raises(SpecError) as error:
        parse_job_spec(document(model=model, train={"frozen": frozen}))
    (problem,) = error.value.problems
    return problem


def test_unknown_frozen_parameter_is_reported_with_the_nearest_name():
    problem = problem_of(["embedding", "layer.0"])
    assert (problem.path, problem.rule) == ("train.frozen.1", "the model has no parameter layer.0")
    assert problem.suggestion == "layers.0"
    tied = problem_of(["output"])
    assert (tied.path, tied.suggestion is not None) == ("train.frozen.0", True), "it is the embedding"


def test_custom_model_cannot_freeze_parameters():
    problem = problem_of(["embedding"], family="custom", entrypoint="mine:build")
    assert (problem.path, problem.unsupported, problem.suggestion) == ("train.frozen", True, "[]")


def test_custom_model_cannot_have_adapters():
    custom = document(model={"family": "custom", "entrypoint": "mine:build"}, train={"lora": {}})
    (problem,) = problems_of(custom)
    assert (problem.path, problem.unsupported, problem.suggestion) == ("train.lora", True, "null")


def test_adapters_of_all_layers_are_trained_and_nothing_else():
    job = spec(model=GPT, train={"lora": {"targets": ["q", "down"]}})
    names = set(parameter_names(job.model, job.train.lora))
    assert frozen_names(job) == set(parameter_names(job.model)) < names
    ends = [f"{name}.lora_{end}" for name in ("attention.q", "mlp.down") for end in "ab"]
    assert names - frozen_names(job) == {f"layers.{layer}.{end}" for layer in range(12) for end in ends}
    assert (first_trained_layer(job), set(needs_gradient(job))) == (0, {True})


def test_spec_that_freezes_all_parameters_is_refused():
    problem = problem_of(["*"])
    assert (problem.path, problem.rule) == ("train.frozen", "no parameter would be trained")
    assert frozen_names(parse_job_spec(document(train={"frozen": ["embedding"]})))


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "rows"),
    [
        (50257, 1, 50304), (50257, 8, 51200), (50304, 1, 50304), (50257, 64, 50304), (257, 1, 257), (257, 2, 258),
        (97, 4, 100),
    ],
)  # fmt: skip
def test_large_vocabularies_are_padded_to_whole_tiles_of_each_rank(vocabulary, tensor, rows):
    assert padded_rows(vocabulary, tensor) == rows
