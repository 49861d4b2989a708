"""A command loads what it needs, and no more; what `--version` says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manta.api.cli import main
from manta.api.cli.overview import COMMANDS, MODULES, overview
from manta.api.rest_version import REST
from manta.service.revisions import newest_revision
from manta.workers.protocol.messages import PROTOCOL

LOADED = "import sys; from manta.api.cli.main import command_line; [command_line(each) for each in sys.argv[1:]]; "
LOADED += "print(*sys.modules)"


def loaded_for(*commands: str) -> set[str]:
    """Modules that are imported in a process that builds the command line for each of these commands. Together in one
    process, since it takes longer to start one than to load all of them."""
    output = subprocess.run([sys.executable, "-c", LOADED, *commands], capture_output=True, text=True, check=True)
    return set(output.stdout.split())


def test_commands_that_only_ask_a_service_import_neither_sqlalchemy_nor_torch() -> None:
    commands = {"status", "ps", "checkpoints", "submit", "compare", "logs", "up"}
    modules = loaded_for(*commands)
    assert {"sqlalchemy", "torch", "ray", "fastapi"}.isdisjoint(modules) and "httpx" in modules
    others = ("access", "calibrate", "db", "doctor", "engine", "nodes", "plan", "trace", "track")
    assert modules.isdisjoint({f"manta.api.cli.{module}" for module in others})


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"], []])
def test_help_and_version_import_no_client_and_no_schemas(arguments: list[str]) -> None:
    script = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
    command = [sys.executable, "-c", f"{script}from manta.api.cli.__main__ import main; main()", *arguments]
    modules = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[-1].split()
    assert "typer" in modules and {"manta.api.schemas", "httpx", "sqlalchemy", "manta.api.cli.main"}.isdisjoint(modules)


def test_service_imports_no_driver_of_a_database_before_it_is_known_which():
    script = "import sys, manta.api.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert {"psycopg", "torch"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("wanted", [None, "--help", "no-such-command"])
def test_command_line_has_every_command_with_the_module_of_the_table(wanted: str | None) -> None:
    app = main.command_line(wanted)
    callbacks = {each.name or getattr(each.callback, "__name__", ""): each.callback for each in app.registered_commands}
    for each in app.registered_groups:
        assert each.typer_instance is not None
        callbacks[str(each.name)] = each.typer_instance.registered_commands[0].callback
    assert {name: getattr(callback, "__module__", "") for name, callback in callbacks.items()} == {
        name: f"manta.api.cli.{module}" for name, module in MODULES.items()
    }
    assert len(app.registered_commands) + len(app.registered_groups) == len(MODULES)


def test_every_command_has_a_panel_in_the_help() -> None:
    placed = [name for commands in COMMANDS.values() for name in commands]
    shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(overview(), ["--help"]).output
    assert shown == CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(main.command_line(), ["--help"]).output
    at = [re.search(rf"^\W*{name} +[A-Z]", shown, re.MULTILINE) for name in placed]
    assert [each.start() for each in at if each] == sorted(each.start() for each in at if each) and all(at)
    assert max(len(line) for line in shown.splitlines()) <= 200 and len(shown.splitlines()) < len(placed) + 40


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device on which no room is left is Linux's")
def test_output_to_a_full_disk_is_reported_in_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "manta.api.cli", "--version"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, NO_ROOM)


NO_ROOM = "the output cannot be written: No space left on device; the command itself may have succeeded\n"
RUN = "import sys; from pathlib import Path; from manta.api.cli import __main__, overview; "
RUN += "overview.overview = lambda: lambda: {}; __main__.main()"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device on which no room is left is Linux's")
@pytest.mark.parametrize("characters", [10, 10**6])
def test_full_disk_message_is_for_standard_output_only(characters: int) -> None:
    text = f"'x' * {characters}"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", RUN.format(f"(sys.stdout.write({text}), sys.stdout.flush())")]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, NO_ROOM)
    command = [sys.executable, "-c", RUN.format(f"Path('/dev/full').write_text({text})")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and NO_ROOM not in ended.stderr
    assert "Traceback" in ended.stderr and ended.stderr.endswith("OSError: [Errno 28] No space left on device\n")


ROOT = Path(__file__).parents[3]


def test_version_command_prints_release_rest_protocol_and_database_revision():
    said = CliRunner().invoke(overview(), ["--version"])
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert said.exit_code == 0
    pattern = r"manta (\S+) \(REST ([\d, ]+); protocol ([\d, ]+); database revision (\d{4})\)\n"
    stated, rest, protocols, revision = re.fullmatch(pattern, said.output).groups()
    assert (stated, revision) == (release, newest_revision())
    assert str(REST) in rest.split(", ") and str(PROTOCOL) in protocols.split(", ")


def test_package_version_is_above_the_last_listed_release():
    last = (ROOT / "releases.txt").read_text().split("\n")[-2].split()[0]
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    numbers = [tuple(int(part) for part in re.match(r"(\d+)\.(\d+)\.(\d+)", each).groups()) for each in (last, here)]
    assert numbers[0] < numbers[1]
