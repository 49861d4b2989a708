"""`manta calibrate` keeps what it measures, and plans go by it."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

from manta.api.cli import calibrate
from manta.api.cli.main import command_line
from manta.service.planner import machines
from manta.service.planner.hardware import Cluster, Core, CpuNode, Gpu, Links
from manta.service.planner.machines import Calibrated, CalibrationFailed, jobs_since, save
from manta.service.planner.refinement import MIN_JOBS
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system.resources import node_type
from tests.api.conftest import DOCUMENT
from tests.service.support.measured_jobs import train_on

GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
LINKS = Links(3.6e11, 3e-6, 0.1)
OF_H100 = Calibrated("h100-80gb", "H100", 4, gpu=GPU)
CORE = Core(9e10, 1.8e11, 30.0, 2e10, 2e-5, 2e9, 4e-5, 0.9)
PLAN = {
    "model": {"layers": 4, "hidden_size": 256, "heads": 4, "sequence_length": 128, "vocabulary_size": 1000},
    "train": {"global_batch_size": 16},
    "cluster": {"accelerator": "cpu", "nodes": 1, "gpus_per_node": 4},
}


@pytest.fixture
def manta(tmp_path, monkeypatch):
    """Runs a command whose machine is measured in no time; checks the exit code, returns what it printed."""
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machines, "usable_cores", lambda: 4)  # with many cores what is assumed is faster
    calibrations = {
        "auto": Calibrated(node_type(), "Abacus", 4, CORE),
        "cuda": OF_H100,
    }
    monkeypatch.setattr(calibrate, "measure", lambda device, say: calibrations[device])

    def run(*arguments, code=0):
        result = CliRunner().invoke(command_line(), [str(each) for each in arguments])
        assert result.exit_code == code, result.output
        return result.stdout

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN))
    return path


def test_plan_command_uses_the_stored_calibration_of_this_machine(manta, file, tmp_path):
    before = json.loads(manta("plan", file, "--json"))
    assert "default efficiency" in before["note"]
    assert f"{node_type()}: Abacus, 4 cores; stored in {tmp_path / 'home' / 'machines'}" in manta("calibrate")
    after = json.loads(manta("plan", file, "--json"))
    assert after["note"] is None
    assert after["plans"][0]["step_seconds"] < before["plans"][0]["step_seconds"]


def test_calibrate_prints_every_constant(manta):
    assert json.loads(manta("calibrate", "--json"))["core"] == vars(CORE)
    lines = manta("calibrate").splitlines()[1:]
    assert len(lines) == len(vars(CORE)) and "    90.000 GFLOP/s, matmuls in fp32" in lines[0]


def test_plan_for_one_gpu_uses_its_calibration_and_for_two_assumes_the_links(manta, file):
    def plan(gpus):
        cluster = {"accelerator": "h100", "nodes": 1, "gpus_per_node": gpus}
        file.write_text(yaml.safe_dump(PLAN | {"cluster": cluster, "parallel": {"data": gpus}}))
        return json.loads(manta("plan", file, "--json"))

    before = plan(1)
    assert "default efficiency" in before["note"]
    lines = manta("calibrate", "--device", "cuda").splitlines()
    assert lines[0].startswith("h100-80gb: H100, 4 cores") and "   680.000 TFLOP/s, matmuls in bf16" in lines[1]
    after = plan(1)
    assert after["note"] is None
    assert after["plans"][0]["step_seconds"] != before["plans"][0]["step_seconds"]
    assert "the links between them is a default" in plan(2)["note"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "note"),
    [
        (1, 1, None),
        (1, 2, "the links inside a node was measured; how long they wait for one another is a default"),
        (
            2,
            1,
            "inside a node was measured; that of the links between nodes, and how long they wait for one",
        ),
    ],
)
def test_plan_note_says_which_gpu_links_were_measured_and_which_are_assumed(manta, file, tmp_path, nodes, gpus, note):
    save(Paths.of(tmp_path / "home").machines, replace(OF_H100, links=LINKS))
    cluster = {"accelerator": "h100", "nodes": nodes, "gpus_per_node": gpus}
    file.write_text(yaml.safe_dump(PLAN | {"cluster": cluster, "parallel": {"data": nodes * gpus}}))
    said = json.loads(manta("plan", file, "--json"))["note"]
    assert said is None if note is None else note in said


def test_calibrate_prints_gpu_link_constants_or_why_they_were_not_measured(manta, monkeypatch):
    def calibrate_as(made):
        monkeypatch.setattr(calibrate, "measure", lambda device, say: made)
        return CliRunner().invoke(command_line(), ["calibrate"])

    result = calibrate_as(replace(OF_H100, links=LINKS))
    assert result.stderr == "" and [line.split()[0] for line in result.stdout.splitlines()[-3:]] == [
        "360.000",
        "3.000",
        "10.000",
    ]
    result = calibrate_as(replace(OF_H100, links_problem="rank 1: NCCL error"))
    assert result.stderr == (
        "Note: the links between its GPUs were not measured (rank 1: NCCL error): the earlier measurement stays\n"
    )
    assert "360.000 GB/s, links between GPUs" in result.stdout
    document = json.loads(manta("calibrate", "--json"))
    assert (document["links"]["bandwidth"], document["links_problem"]) == (3.6e11, "rank 1: NCCL error")


def test_disturbed_calibration_prints_a_warning(manta, monkeypatch):
    disturbed = replace(Calibrated(node_type(), "Abacus", 4, CORE), other_cores=1.5, spread=0.2)
    monkeypatch.setattr(calibrate, "measure", lambda device, say: disturbed)
    result = CliRunner().invoke(command_line(), ["calibrate"])
    assert result.stderr == f"Warning: {disturbed.warning}\n" and "1.5 of its cores" in result.stderr
    assert json.loads(manta("calibrate", "--json"))["other_cores"] == 1.5


def test_calibrate_list_shows_constants_refined_by_jobs_of_the_service(manta, service, monkeypatch):
    monkeypatch.setenv("MANTA_URL", service.url)
    monkeypatch.setenv("COLUMNS", "200")
    assert "no calibrations" in manta("calibrate", "--list")
    spec = parse_job_spec(DOCUMENT)
    for _ in range(MIN_JOBS):
        train_on(service.store, service.submit()["id"], spec, Cluster(CpuNode(4, 2.0**34).machine(8), 1, 8))
    (line,) = manta("calibrate", "--list").splitlines()[1:]
    assert node_type() in line and "not calibrated" in line and "operation_seconds x" in line
    (machine,) = json.loads(manta("calibrate", "--list", "--json"))["items"]
    assert machine["refined_by_jobs"] == MIN_JOBS


def test_forget_jobs_discards_constants_refined_by_jobs(manta, tmp_path):
    folder = Paths.of(tmp_path / "home").machines
    assert jobs_since(folder) == 0
    assert str(folder) in manta("calibrate", "--forget-jobs")
    assert jobs_since(folder) > 0
    assert json.loads(manta("calibrate", "--forget-jobs", "--json")) == {"file": str(folder / "jobs_since")}
    manta("calibrate", "--forget-jobs", "--list", code=2)


def test_failed_calibration_is_one_sentence_and_exit_code_2(manta, monkeypatch):
    monkeypatch.setattr(
        calibrate, "measure", Mock(side_effect=CalibrationFailed("this machine could not be measured: no memory left"))
    )
    result = CliRunner().invoke(command_line(), ["calibrate"])
    assert (result.exit_code, result.stderr) == (2, "this machine could not be measured: no memory left\n")


@pytest.mark.parametrize("option", [[], ["--forget-jobs"]])
def test_unwritable_home_is_reported_before_calibration_measures_anything(manta, monkeypatch, tmp_path, option):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibrate, "measure", None)
    result = CliRunner().invoke(command_line(), ["calibrate", *option])
    assert result.exit_code == 2 and "cannot be written" in result.stderr and "MANTA_HOME" in result.stderr


def test_unreadable_calibration_file_is_reported_with_advice(manta, file, tmp_path):
    path = save(Paths.of(tmp_path / "home").machines, Calibrated(node_type(), "Abacus", 4, CORE))
    path.write_text("{}")
    result = CliRunner().invoke(command_line(), ["plan", str(file)])
    assert result.exit_code == 2 and "calibrate again, or remove it" in result.stderr


def test_plan_note_names_the_calibrated_form_of_a_gpu_if_it_differs(manta, file, tmp_path):
    cluster = {"accelerator": "h100", "nodes": 1, "gpus_per_node": 1}
    file.write_text(yaml.safe_dump(PLAN | {"cluster": cluster, "parallel": {}}))
    for device, note in (("NVIDIA H100 80GB HBM3", None), ("NVIDIA H100 PCIe", "those of NVIDIA H100 PCIe, which was")):
        save(Paths.of(tmp_path / "home").machines, replace(OF_H100, device=device))
        said = json.loads(manta("plan", file, "--json"))["note"]
        assert said is None if note is None else note in said
