"""An S3 server, and a place that takes its time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from s3_fixtures import bucket, s3_server, wire, wired_bucket  # noqa: F401 - fixtures

from manta.workers.checkpoint.checksums import SummingFile


@pytest.fixture
def store(monkeypatch) -> Iterator[threading.Event]:
    """Takes what is written only once it is set."""
    takes, write = threading.Event(), SummingFile.write

    def held_up(self: SummingFile, data: Any) -> int:
        assert takes.wait(60), "nothing is ever written"
        return write(self, data)

    monkeypatch.setattr(SummingFile, "write", held_up)
    yield takes
    takes.set()
