"""Models come from the packages that the operator lists, and from nowhere else."""

import pytest

from manta.service.control.options import ModelPackages
from manta.workers.spec.reading import parse_job_spec


def job(**model):
    shape = {"layers": 1, "hidden_size": 8, "heads": 1, "sequence_length": 8}
    return parse_job_spec({"model": {**shape, **model}, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})


def custom(entrypoint):
    return job(family="custom", entrypoint=entrypoint)


@pytest.mark.parametrize("entrypoint", ["ours:build", "ours.deep.er:build", "team.public:f", "team.public.x:f"])
def test_a_listed_package_and_all_below_it_may_be_used(entrypoint):
    assert ModelPackages(("ours", "team.public")).problems(custom(entrypoint)) == []


@pytest.mark.parametrize("entrypoint", ["os:system", "ours2:build", "team:f", "team.publicity:f", "our:build"])
def test_all_others_are_refused_by_name(entrypoint):
    (problem,) = ModelPackages(("ours", "team.public")).problems(custom(entrypoint))
    assert problem.path == "model.entrypoint"
    expected = f"{entrypoint} is of no package that jobs may take models from (MANTA_MODEL_PACKAGES: ours, team.public)"
    assert problem.rule == expected


def test_without_a_list_there_are_built_in_models_alone():
    assert ModelPackages().problems(job()) == []
    (problem,) = ModelPackages().problems(custom("ours:build"))
    assert "MANTA_MODEL_PACKAGES: none is set" in problem.rule
