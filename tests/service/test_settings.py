"""Settings come from the environment, and only from there."""

from pathlib import Path

import pytest

from service.settings import Settings


def test_without_an_environment_there_are_defaults():
    settings = Settings.from_environment({})
    assert settings == Settings(home=Path.home() / ".manta", url=None)


@pytest.mark.parametrize("name", ["MANTA_HOME", "MANTA_URL"])
def test_an_empty_variable_is_as_none(name):
    assert Settings.from_environment({name: ""}) == Settings.from_environment({})


def test_a_home_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environment({"MANTA_HOME": "state", "MANTA_URL": "http://there"})
    assert (settings.home, settings.url) == (tmp_path / "state", "http://there")
    assert settings.service_file == tmp_path / "state" / "service.json"


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_faults_are_made_only_where_somebody_said_so(value, allowed):
    assert Settings.from_environment({"MANTA_ALLOW_FAULTS": value}).allow_faults is allowed
