"""`manta calibrate` keeps what it measures, and plans go by it."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from api.cli import calibrate
from api.cli.main import command_line
from service.machines import Calibrated, CalibrationFailed, save
from service.planner.hardware import Core
from workers.paths import Paths
from workers.system.processor import node_type

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
    monkeypatch.setattr(calibrate, "measure", lambda name, say: Calibrated(name, "Abacus", 4, CORE))

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


def test_plans_go_by_the_calibration(manta, file, tmp_path):
    before = json.loads(manta("plan", file, "--json"))
    assert "neither fitted nor measured" in before["note"]
    assert f"{node_type()}: Abacus, 4 cores; kept in {tmp_path / 'home' / 'machines'}" in manta("calibrate")
    after = json.loads(manta("plan", file, "--json"))
    assert after["note"] is None
    assert after["plans"][0]["step_seconds"] < before["plans"][0]["step_seconds"]


def test_every_constant_is_printed(manta):
    assert json.loads(manta("calibrate", "--json"))["core"] == vars(CORE)
    lines = manta("calibrate").splitlines()[1:]
    assert len(lines) == len(vars(CORE)) and "    90.000 GFLOP/s, products in fp32" in lines[0]


def test_a_failure_is_a_sentence(manta, monkeypatch):
    def fails(name, say):
        raise CalibrationFailed("this machine could not be measured: no memory left")

    monkeypatch.setattr(calibrate, "measure", fails)
    result = CliRunner().invoke(command_line(), ["calibrate"])
    assert (result.exit_code, result.stderr) == (2, "this machine could not be measured: no memory left\n")


def test_a_broken_calibration_is_a_sentence(manta, file, tmp_path):
    path = save(Paths.of(tmp_path / "home").machines, Calibrated(node_type(), "Abacus", 4, CORE))
    path.write_text("{}")
    result = CliRunner().invoke(command_line(), ["plan", str(file)])
    assert result.exit_code == 2 and "calibrate again, or remove it" in result.stderr
