"""A clock that moves only when a test says so."""

import pytest
from moved_clock import MovedClock


@pytest.fixture
def clock() -> MovedClock:
    """At 100 seconds."""
    return MovedClock()
