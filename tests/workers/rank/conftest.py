"""A trainer process beside the test."""

import pytest
from trainer_rig import Rig

from manta.workers.rank import trainer_process


@pytest.fixture
def rig(monkeypatch):
    """Makes one whose trainer does these acts."""
    made = []
    monkeypatch.setattr(trainer_process, "lower_priority", lambda: None)

    def make(*acts):
        made.append(Rig(*acts))
        return made[-1]

    yield make
    for each in made:
        each.close()
