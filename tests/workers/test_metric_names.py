"""Metrics that only some jobs have."""

from __future__ import annotations

import pytest
from engine_specs import spec

from manta.workers.training import metric_names


def test_a_job_has_a_loss_for_each_validation_set_and_a_z_loss_where_it_asks_for_one():
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
def test_what_another_release_has_stored_does_no_harm(stored):
    assert metric_names.of_job(stored) == ()
