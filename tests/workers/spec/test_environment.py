"""Which environment variables a job may set for its trainers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine_specs import document

from manta.workers.spec.environment import ALLOWED
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec

DOCUMENT = Path(__file__).parents[3] / "docs" / "parallelism.md"


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
        ("NCCL_NET_PLUGIN", None),
        ("NCCL_DEBUG_FILE", "NCCL_DEBUG"),
        ("NCCL_TOPO_DUMP_FILE", None),
        ("LD_PRELOAD", None),
        ("CUDA_VISIBLE_DEVICES", None),
        ("nccl_algo", "NCCL_ALGO"),
        ("MANTA_HOME", None),
    ],
)
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
    with pytest.raises(SpecError, match=r"resources\.environment\.NCCL_ALGO: a value has at most 1000 characters"):
        parse_job_spec(environment(NCCL_ALGO=value))


def test_allowed_environment_variables_name_no_file_or_library():
    assert not [name for name in ALLOWED if re.search("FILE|PLUGIN|PATH|DIR|_LIB|PRELOAD", name)]


def test_allowed_environment_variables_are_all_documented():
    section = DOCUMENT.read_text().partition("## Environment variables of a job")[2].partition("\n## ")[0]
    paragraph = section.rpartition(":\n")[2]
    assert set(re.findall("`([A-Z0-9_]+)`", paragraph)) == ALLOWED
