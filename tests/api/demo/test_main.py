"""The demo as a whole: when it kills, and that it leaves nothing running."""

import copy
from unittest.mock import Mock

import pytest

from manta.api.demo import __main__ as demo
from manta.workers.errors import MantaError
from manta.workers.spec.reading import parse_job_spec
from tests.api.conftest import DOCUMENT


@pytest.mark.parametrize(("steps", "every", "saved"), [(20, 5, 15), (21, 5, 20), (24, 5, 20), (5, 5, 0), (4, 5, 0)])
def test_demo_comparison_begins_at_the_last_checkpoint_before_the_end(steps, every, saved):
    """That of the last step is saved when nothing can be killed any more."""
    document = copy.deepcopy(DOCUMENT)
    document["train"]["steps"], document["checkpoint"] = steps, {"every_steps": every}
    assert demo.last_intermediate_checkpoint(parse_job_spec(document)) == saved


@pytest.mark.parametrize(("error", "status"), [(MantaError("no room"), 1), (KeyboardInterrupt(), 130)])
def test_demo_that_fails_reports_it_and_stops_its_service(monkeypatch, error, status):
    stopped = []
    monkeypatch.setattr(demo, "_demo", Mock(side_effect=error))
    monkeypatch.setattr(demo, "stop_service", stopped.append)
    assert (demo.main(), stopped) == (status, [demo.HOME])
