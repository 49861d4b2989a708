"""Settings come from the environment, and only from there."""

from pathlib import Path

import pytest

from service.settings import BadSetting, Settings


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


def test_snapshots_of_failed_jobs_are_kept_for_a_day_or_what_is_asked_for():
    assert Settings.from_environment({}).failed_memory_hours == 24
    assert Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": "0.5"}).failed_memory_hours == 0.5


@pytest.mark.parametrize("value", ["a day", "-1", "nan", "inf"])
def test_hours_that_are_none_are_refused(value):
    with pytest.raises(BadSetting, match=f"MANTA_FAILED_MEMORY_HOURS is '{value}'"):
        Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": value})


def test_folders_of_data_are_separated_by_colons_and_absolute():
    assert Settings.from_environment({}).data_roots is None
    read = Settings.from_environment({"MANTA_DATA_ROOTS": "/data:/srv/texts:"})
    assert read.data_roots == (Path("/data"), Path("/srv/texts"))
    with pytest.raises(BadSetting, match="MANTA_DATA_ROOTS names texts"):
        Settings.from_environment({"MANTA_DATA_ROOTS": "/data:texts"})


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_faults_are_made_only_where_somebody_said_so(value, allowed):
    assert Settings.from_environment({"MANTA_ALLOW_FAULTS": value}).allow_faults is allowed


def test_names_of_the_service_are_separated_by_commas():
    assert Settings.from_environment({}).allowed_hosts == ()
    named = Settings.from_environment({"MANTA_ALLOWED_HOSTS": " a.example, b.example ,,"})
    assert named.allowed_hosts == ("a.example", "b.example")


def test_snapshots_of_failed_jobs_may_go_at_once():
    assert Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": "0"}).failed_memory_hours == 0
