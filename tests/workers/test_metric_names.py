"""Metrics that only some jobs have."""

from __future__ import annotations

import pytest
from engine_specs import spec

from manta.workers.training import metric_names


def test_metric_names_of_a_job_include_its_validation_sets_and_z_loss():
    sets = [{"name": name, "paths": ["a.txt"]} for name in ("b", "a_2")]
    job = spec(data={"validation": sets}, train={"validate_every": 5, "z_loss": 1e-4})
    document = job.model_dump(mode="json")
    assert metric_names.of_job(document) == ("validation_loss_b", "validation_loss_a_2", "z_loss")
    assert metric_names.of_job(spec().model_dump(mode="json")) == ()


@pytest.mark.parametrize(
    "stored",
    [{}, {"data": None, "train": 5}, {"data": {"validation": {"a": 1}}}, {"data": {"validation": [None, {"name": 3}]}}],
    ids=str,
)
def test_metric_names_of_a_malformed_stored_spec_are_empty(stored):
    assert metric_names.of_job(stored) == ()
