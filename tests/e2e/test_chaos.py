"""The soak's short form: jobs with faults of many kinds end as if nothing had happened. `python -m benchmarks.chaos` is
the long one."""

import pytest

from benchmarks.chaos import Soak
from benchmarks.support.chaos_schedule import short_form
from benchmarks.support.own_service import OwnService
from benchmarks.support.ray_view import RayView


class SharedService(OwnService):
    """The service of all these tests, as the benchmark sees its own."""

    def __init__(self, manta):
        self._manta, self.home, self.paths, self.client = manta, manta.home, manta.paths, manta.client

    def start(self):
        self._manta.start()
        self.client = self._manta.client

    def kill(self):
        self._manta.kill_service()


@pytest.fixture(scope="module")
def soak(manta):
    with RayView(str(manta.home)) as ray:
        yield Soak(SharedService(manta), ray, seed=1234)


SHORT_FORM = [pytest.param(drawn, id="+".join(strike.way for strike in drawn.strikes)) for drawn in short_form()]


@pytest.mark.soak  # each of the faults has a test of its own
@pytest.mark.parametrize("drawn", SHORT_FORM)
def test_job_ends_as_if_nothing_had_happened(soak, drawn):
    outcome = soak.run(drawn)
    assert outcome.problems == []
    assert outcome.recoveries >= sum(strike.lethal for strike in drawn.strikes)
