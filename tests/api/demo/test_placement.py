"""A demo job with more ranks than the machine has GPUs runs on CPU slots; with none or enough, nothing is changed."""

import json

import pytest

from manta.api.demo.__main__ import SPEC, slots_where_gpus_are_scarce
from manta.api.schemas import Cluster
from manta.service.cluster import ray_head
from manta.service.cluster.placement import unit_of
from manta.workers.spec.reading import parse_job_spec, read_document


def cluster(gpus):
    node = {"id": "n1", "address": "127.0.0.1", "alive": True, "free": 0}
    place = {"accelerator": "gpu", "total": gpus} if gpus else {"accelerator": "cpu", "total": 16}
    return Cluster.model_validate({"nodes": [{**node, **place}]})


@pytest.mark.parametrize("gpus", range(1, 8))
def test_demo_runs_on_cpu_slots_when_the_cluster_has_too_few_gpus(gpus):
    document = read_document(SPEC)
    changed, note = slots_where_gpus_are_scarce(document, parse_job_spec(document), cluster(gpus))
    spec = parse_job_spec(changed)
    assert unit_of(spec.resources.accelerator, cluster_has_gpus=True) == "manta_slot"
    assert f"{gpus} GPU" in note and "8 ranks" in note and "CPU slots" in note
    assert {**changed, "resources": None} == {**document, "resources": None}


@pytest.mark.parametrize("gpus", [0, 8, 16])
def test_demo_leaves_its_spec_unchanged_with_no_or_enough_gpus(gpus):
    document = read_document(SPEC)
    assert slots_where_gpus_are_scarce(document, parse_job_spec(document), cluster(gpus)) == (document, None)


@pytest.mark.parametrize("gpus", [0, 1, 7])
def test_ray_head_offers_cpu_slots_beside_gpus(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_head, "count_gpus", lambda: gpus)
    command = ray_head.RayHead(tmp_path)._command()
    resources = next(part for part in command if part.startswith("--resources=")).partition("=")[2]
    assert json.loads(resources) == {"manta_slot": 16}
