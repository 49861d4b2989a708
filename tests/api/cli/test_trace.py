"""`manta trace` asks for nothing that it could not write."""

from typer.testing import CliRunner

from manta.api.cli.main import command_line


def test_a_trace_that_could_not_be_written_is_not_asked_for(tmp_path):
    words = ["trace", "job_000000000000", "--output", str(tmp_path / "away" / "step.json")]
    ended = CliRunner().invoke(command_line("trace"), words)
    assert (ended.exit_code, f"there is no folder {tmp_path / 'away'}" in ended.stderr) == (2, True)
