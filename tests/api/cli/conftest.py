"""Commands against a real server, and an S3 server for those that read from and write to object stores."""

import pytest
import yaml
from s3_fixtures import bucket, s3_server  # noqa: F401 - fixtures
from typer.testing import CliRunner

from manta.api.cli.main import command_line

app = command_line()


@pytest.fixture
def manta(service, tmp_path):
    """Runs a command; checks its exit code and that nobody sees a traceback."""
    environment = {"MANTA_URL": service.url, "MANTA_HOME": str(tmp_path), "COLUMNS": "200"}

    def run(*arguments, code=0, input=None, **changes):
        result = CliRunner().invoke(app, [*map(str, arguments)], env={**environment, **changes}, input=input)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def spec_file(tmp_path, document):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
