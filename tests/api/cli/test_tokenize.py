"""Commands that work without a service: `tokenize`, `evaluate`, `generate`, `run`."""

import contextlib
import importlib
import io
import json
import re
import subprocess
import sys

import pytest
import yaml
from tokenizer_files import TEXT, byte_level, plain_tokens
from typer.testing import CliRunner

from manta.api.cli import engine
from manta.api.cli.main import app
from manta.workers.checkpoint.catalog import Manifest, checkpoint_path, seal
from manta.workers.checkpoint.checksums import SummedFiles
from manta.workers.paths import Paths


@pytest.fixture
def tokenize(tmp_path):
    """Runs the command on a job with a corpus beside it."""
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT[:20]))

    def run(*arguments, code=0, **data):
        data = {"source": "jsonl", "paths": ["a.jsonl"], "tokenizer": "tokenizer.json", **data}
        model = {"layers": 1, "hidden_size": 8, "heads": 1, "sequence_length": 8}
        job = {"model": model, "data": data, "train": {"steps": 1}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        environment = {"MANTA_HOME": str(tmp_path / "home")}
        result = CliRunner().invoke(app, ["tokenize", str(tmp_path / "job.yaml"), *arguments], env=environment)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_tokenize_stores_tokens_in_the_home(tokenize, tmp_path):
    count = len(plain_tokens(tmp_path / "tokenizer.json", TEXT[:20]))
    cache = Paths.of(tmp_path / "home").token_cache
    lines = tokenize("--processes", "1").splitlines()
    assert lines[0].startswith("tokenizing 1 file (")
    assert lines[-1] == f"{count} tokens are in {cache}"
    answer = json.loads(tokenize("--json"))
    assert (answer["tokens"], answer["cache"], len(answer["digest"])) == (count, str(cache), 64)
    assert len(list(cache.glob("*/tokens.bin"))) == 1


def test_tokenize_reports_invalid_input_in_one_sentence(tokenize):
    assert "no key 'body'" in tokenize(code=2, text_key="body")
    assert "no tokenizer can be read from" in tokenize(code=2, tokenizer="gone.json")
    assert "nothing to prepare" in tokenize(code=2, source="text", tokenizer="bytes")


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
    what = ["--prompt", "a b"] if command == "generate" else ["--text", "a b"]
    words = [command, str(folder), *what, "--batch-size", "5", "--step", "10"]
    assert CliRunner().invoke(app, words).exit_code == 3
    checkpoint = str(checkpoint_path(folder, 10, 1))
    assert called == [engine._engine(command, checkpoint, *what, "--batch-size", "5")]


@pytest.mark.parametrize(
    "words", ["generate", "evaluate", "evaluate --text a --validation", "generate --prompts a --prompt b"]
)
def test_engine_command_that_lacks_what_it_works_on_is_refused_without_torch(called, folder, words):
    command, *given = words.split()
    ended = CliRunner().invoke(app, [command, str(folder), *given])
    assert (ended.exit_code, called) == (2, []) and "Error" in ended.output


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
