"""`manta evaluate` and `generate` find the checkpoint and leave the rest to the engine's own commands."""

import contextlib
import importlib
import io
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from manta.api.cli import engine
from manta.api.cli.main import app
from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal
from manta.workers.checkpoint.checksums import SummedFiles


@pytest.fixture
def called(monkeypatch):
    """Commands that were run; each ends with 3."""
    commands = []

    def run(words, check):
        commands.append(words)
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(engine.subprocess, "run", run)
    return commands


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20):
        path = checkpoint_path(tmp_path, step, 1)
        path.mkdir()
        files = SummedFiles()
        with files.create(path / "data") as stream:
            stream.write(b"x")
        seal(path, Manifest("j", 1, step, {"data": 1}, {}, blocks={"data": list(files.sums["data"].blocks)}))
    return tmp_path


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_unknown_options_are_passed_to_the_engine_whose_exit_status_is_returned(called, folder, command):
    words = [command, str(folder), "--prompt", "a b", "--top-k", "5", "--step", "10"]
    assert CliRunner().invoke(app, words).exit_code == 3
    checkpoint = str(checkpoint_path(folder, 10, 1))
    assert called == [engine._engine(command, checkpoint, "--prompt", "a b", "--top-k", "5")]


def test_engine_command_without_a_checkpoint_runs_nothing(called, tmp_path):
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "none"), "--prompt", "a"])
    assert result.exit_code != 0 and not called


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_engine_options_are_listed_without_a_model(called, command):
    assert CliRunner().invoke(app, [command, "--options"]).exit_code == 3
    assert called == [engine._engine(command, "--help")]


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_the_help_names_every_option_of_the_engines_command(command):
    command_of_engine = importlib.import_module(f"manta.workers.{command}")
    shown = CliRunner().invoke(app, [command, "--help"]).output
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as output:
        command_of_engine.main(["--help"])
    assert {option for option in re.findall(r"--[a-z-]+", output.getvalue()) if option not in shown} == set()


def test_engine_usage_errors_name_the_manta_command(tmp_path, monkeypatch, capsys):
    program, safe, flag, code, *arguments = engine._engine("generate", str(tmp_path), "--prompt", "a", "--top-p", "7")
    assert (program, safe, flag) == (sys.executable, "-P", "-c")
    monkeypatch.setattr(sys, "argv", [flag, *arguments])
    with pytest.raises(SystemExit) as ended:
        exec(code, {})
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("usage: manta generate ")
    assert "manta generate: error: --temperature and --top-k are at least 0" in said
