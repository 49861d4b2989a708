"""An S3 server for the tests that want one, with a bucket of its own for each; a conftest.py imports these."""

import itertools

import pytest
from s3_server import S3Server, Wire, reached_at

from manta.workers.storage.locations import ObjectPath

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server():
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server):
    """An empty bucket, which this process finds at the server itself."""
    name = f"bucket-{next(_numbers)}"
    s3_server.make_bucket(name)
    with reached_at(s3_server.url):
        yield ObjectPath("s3", name)


@pytest.fixture
def wire(s3_server):
    """Between this process and the server."""
    wire = Wire(s3_server)
    yield wire
    wire.close()


@pytest.fixture
def wired_bucket(s3_server, wire):
    """An empty bucket, which is reached by the wire alone."""
    name = f"bucket-{next(_numbers)}"
    s3_server.make_bucket(name)
    with reached_at(wire.url):
        yield ObjectPath("s3", name)
