"""`manta trace` asks for nothing that it could not write."""

from typer.testing import CliRunner

from manta.api.cli.main import command_line


def test_trace_command_with_an_unwritable_output_requests_no_trace(tmp_path):
    words = ["trace", "job_000000000000", "--output", str(tmp_path / "away" / "step.json")]
    ended = CliRunner().invoke(command_line("trace"), words)
    assert (ended.exit_code, f"there is no folder {tmp_path / 'away'}" in ended.stderr) == (2, True)
