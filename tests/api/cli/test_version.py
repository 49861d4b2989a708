"""`manta --version` tells one release from another."""

import re
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from manta.api.cli import main
from manta.api.rest_version import REST
from manta.service.store.database import newest_revision
from manta.workers.protocol.messages import PROTOCOL

ROOT = Path(__file__).parents[3]


@pytest.fixture
def app():
    made = typer.Typer()
    made.callback()(main._options)
    for name in ("one", "other"):
        made.command(name)(lambda: None)
    return made


def test_version_command_prints_release_rest_protocol_and_database_revision(app):
    said = CliRunner().invoke(app, ["--version"])
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
