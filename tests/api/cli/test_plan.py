"""`manta plan` needs no service for a cluster that its file describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from documented import blocks_of
from typer.testing import CliRunner

from manta.api.cli.main import command_line
from manta.service.words import byte_count
from tests.api.conftest import DOCUMENT
from tests.api.support.keys import ADMIN
from tests.api.test_plans import PLAN

DOCS = Path(__file__).parents[3] / "docs"
LLAMA_8B = {
    "family": "llama", "layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden_size": 14336,
    "vocabulary_size": 128256,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`manta plan` on a document; checks the exit code, returns what it printed."""
    monkeypatch.delenv("MANTA_URL", raising=False)
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "home"))

    def run(document, *options, code=0):
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(document))
        result = CliRunner().invoke(command_line(), ["plan", str(file), *options])
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_plan_prints_the_best_layouts_as_a_table(plan):
    answer = json.loads(plan(PLAN, "--json"))
    assert answer["plans"][0]["step_seconds"] <= answer["plans"][-1]["step_seconds"]
    table = plan(PLAN)
    assert table.splitlines()[0].split()[:3] == ["LAYOUT", "SCHEDULE", "MICRO-BATCH"]
    taken = byte_count(answer["plans"][0]["host_memory_bytes"])
    assert f"The best plan uses {taken} of a node's memory for snapshots" in " ".join(table.split())


def test_layouts_in_the_page_on_fine_tuning_are_what_is_planned(plan):
    blocks = blocks_of("fine_tuning.md")
    job = next(yaml.safe_load(text) for kind, text in blocks if kind == "yaml")
    job["model"] = LLAMA_8B | {"sequence_length": job["model"]["sequence_length"]}
    rows = [line.split() for line in (DOCS / "fine_tuning.md").read_text().splitlines()]
    options = ("--set", "cluster.accelerator=h100-80gb", "--set", "cluster.nodes=1")
    assert all(line.split() in rows for line in plan(job, *options).splitlines()[:4])


def test_layers_of_uneven_stages_are_printed_and_drawn(plan, tmp_path):
    model = PLAN["model"] | {"layers": 8, "vocabulary_size": 100_000}
    layout = {"pipeline": 4, "stage_layers": [3, 2, 2, 1]}
    output = plan(PLAN | {"model": model, "parallel": layout}, "--picture", str(tmp_path / "plan.svg"))
    assert "1f1b x 1, uneven" in output
    assert "Layers of the virtual stages of plan 1: 3, 2 x 2, 1." in output
    assert "stages of 3, 2 x 2, 1 layers" in (tmp_path / "plan.svg").read_text()
    assert "Layers of" not in plan(PLAN | {"model": model, "parallel": {"pipeline": 4}})


def test_the_way_in_which_context_ranks_communicate_is_printed(plan):
    layout = {"context": 2, "context_method": "ring"}
    assert "Context ranks exchange keys and values by ring." in plan(PLAN | {"parallel": layout})
    assert "Context ranks" not in plan(PLAN | {"parallel": {"data": 2}})


def test_plan_for_an_unmeasured_machine_comes_with_a_note(plan):
    untried = PLAN | {"cluster": PLAN["cluster"] | {"accelerator": "h100-80gb"}}
    assert "default efficiency" in json.loads(plan(untried, "--json"))["note"]
    assert "Note: estimates use default efficiency for this hardware" in plan(untried)
    assert json.loads(plan(PLAN, "--json"))["note"] is None
    assert "Note:" not in plan(PLAN)


def test_plan_command_says_why_a_given_layout_does_not_fit(plan):
    large = PLAN["model"] | {"layers": 96, "hidden_size": 12288, "heads": 96}
    output = plan(PLAN | {"model": large, "parallel": {"tensor": 4}})
    assert output.startswith("no layout fits")
    assert "4x1x1: does not fit: " in output


def test_plan_errors_are_sentences_and_exit_code_2(plan):
    assert "cluster.accelerator: unknown accelerator 'abacus'" in plan(
        PLAN | {"cluster": {"accelerator": "abacus"}}, code=2
    )


def test_plan_without_a_cluster_needs_a_reachable_service(plan):
    assert "cannot reach Manta" in plan(
        {key: PLAN[key] for key in ("model", "train")}, "--url", "http://127.0.0.1:9", code=3
    )


def test_plan_command_plans_a_job_for_the_cluster_of_the_service(plan, service, monkeypatch):
    monkeypatch.setenv("MANTA_API_KEY", ADMIN)
    answer = json.loads(plan(DOCUMENT | {"parallel": "auto"}, "--json", "--url", service.url))
    assert answer["plans"]


def test_plan_command_explains_and_draws_the_best_plan(plan, tmp_path):
    shown = plan(PLAN, "--explain", "--picture", str(tmp_path / "plan.svg"))
    assert "Time of the best plan's step:" in shown
    assert "micro_batch_size: " in shown.split("Effects of single changes:")[1]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg ")
    answer = json.loads(plan(PLAN, "--explain", "--json"))
    step = sum(each["seconds"] for each in answer["explanation"]["shares"])
    assert step == pytest.approx(answer["plans"][0]["step_seconds"])
    assert json.loads(plan(PLAN, "--json"))["explanation"] is None


def test_unwritable_plan_picture_is_reported(plan, tmp_path):
    assert "cannot write" in plan(PLAN, "--picture", str(tmp_path / "nowhere" / "plan.svg"), code=2)
