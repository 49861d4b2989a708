"""Somebody who takes traces."""

from collections.abc import Iterator

import pytest

from tests.service.support.otlp_collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    """It listens, and takes what it is sent."""
    made = Collector()
    yield made
    made.close()
