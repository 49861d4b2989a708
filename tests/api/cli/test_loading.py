"""A command loads what it needs, and no more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from manta.api.cli import main
from manta.api.cli.main import PANELS

LOADED = "import sys; from manta.api.cli.main import command_line; [command_line(each) for each in sys.argv[1:]]; "
LOADED += "print(*sys.modules)"


def test_commands_that_only_ask_a_service_import_neither_sqlalchemy_nor_torch() -> None:
    """Together in one process, since it takes longer to start one than to load all of them."""
    commands = ("status", "ps", "checkpoints", "submit", "compare", "logs", "up")
    output = subprocess.run([sys.executable, "-c", LOADED, *commands], capture_output=True, text=True, check=True)
    modules = output.stdout.split()
    assert {"sqlalchemy", "torch", "ray", "fastapi"}.isdisjoint(modules) and "httpx" in modules


def names_of(app: typer.Typer) -> set[str]:
    commands = {each.name or getattr(each.callback, "__name__", "") for each in app.registered_commands}
    return {str(name) for name in commands | {each.name for each in app.registered_groups}}


def commands_for(wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the command line has, built for `wanted`."""
    app = typer.Typer()
    app.registered_commands = list(OWN)
    monkeypatch.setattr(main, "app", app)
    return names_of(main.command_line(wanted))


OWN = [each for each in main.app.registered_commands if each.callback and each.callback.__module__ == main.__name__]


@pytest.mark.parametrize("file", main._FILES)
def test_command_line_loads_one_file_for_a_named_command(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {str(each.name or getattr(each.callback, "__name__", "")) for each in OWN}
    for command in main._FILES[file]:
        assert commands_for(command, monkeypatch) == own | set(main._FILES[file])


@pytest.mark.parametrize("wanted", [None, "--help", "no-such-command"])
def test_command_line_loads_all_commands_when_none_is_named(
    wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = commands_for(wanted, monkeypatch)
    assert everything >= {command for commands in main._FILES.values() for command in commands} | {"submit", "status"}
    assert commands_for("submit", monkeypatch) < everything


def test_every_command_has_a_panel_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = commands_for(None, monkeypatch)
    placed = [name for names in PANELS.values() for name in names.split()]
    assert sorted(placed) == sorted(everything)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    shown = runner.invoke(main.app, ["--help"]).output
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
RUN = "import sys; from pathlib import Path; from manta.api.cli import __main__, main; "
RUN += "main.command_line = lambda wanted: lambda: {}; __main__.main()"


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
