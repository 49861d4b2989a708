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
def test_model_of_a_listed_package_or_below_is_allowed(entrypoint):
    assert ModelPackages(("ours", "team.public")).problems(custom(entrypoint)) == []


@pytest.mark.parametrize("entrypoint", ["os:system", "ours2:build", "team:f", "team.publicity:f", "our:build"])
def test_model_of_a_package_that_is_not_listed_is_refused_by_name(entrypoint):
    (problem,) = ModelPackages(("ours", "team.public")).problems(custom(entrypoint))
    assert problem.path == "model.entrypoint"
    expected = f"{entrypoint} is of no package that jobs may take models from (MANTA_MODEL_PACKAGES: ours, team.public)"
    assert problem.rule == expected


def test_custom_models_are_refused_without_a_list_of_packages():
    assert ModelPackages().problems(job()) == []
    (problem,) = ModelPackages().problems(custom("ours:build"))
    assert "MANTA_MODEL_PACKAGES: none is set" in problem.rule
