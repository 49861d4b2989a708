"""`manta trace` and `manta track`."""

import pytest
from typer.testing import CliRunner

from manta.api.cli.main import command_line


def test_trace_command_with_an_unwritable_output_requests_no_trace(tmp_path):
    words = ["trace", "job_000000000000", "--output", str(tmp_path / "away" / "step.json")]
    ended = CliRunner().invoke(command_line("trace"), words)
    assert (ended.exit_code, f"there is no folder {tmp_path / 'away'}" in ended.stderr) == (2, True)


@pytest.fixture
def manta(manta):
    """What `manta track` prints."""
    return lambda *words, code=0: manta("track", *words, code=code).output


def test_track_writes_a_finished_job_to_its_last_step(service, manta, tmp_path):
    job = service.submit()["id"]
    service.move(job, "STARTING", "RUNNING")
    service.report(job, [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)])
    service.move(job, "CANCELLING", "CANCELLED")
    assert f"{job} is CANCELLED: metrics up to step 3 are written" in manta(job, "--tensorboard", tmp_path / "board")
    assert [folder.name for folder in (tmp_path / "board").iterdir()] == [job]


def test_track_needs_a_target_to_write_to(service, manta):
    assert "--tensorboard FOLDER" in manta(service.submit()["id"], code=2)


def test_track_of_an_unknown_job_writes_nothing(manta, tmp_path):
    manta("job-none", "--tensorboard", tmp_path / "board", code=2)
    assert not (tmp_path / "board").exists()
