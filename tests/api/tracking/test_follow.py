"""A job's metrics are carried over once each, in order, to the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from manta.api.schemas import MetricSeries
from manta.api.tracking import track


class Growing:
    """A job that has committed one of `ends` steps at each look; in `state` at the last one."""

    def __init__(self, *ends: int, state: str = "SUCCEEDED"):
        self._ends, self._looks, self._state = ends, 0, state

    def job(self, job_id):
        last = self._looks == len(self._ends) - 1
        self._committed = self._ends[self._looks]
        self._looks += 1
        return SimpleNamespace(id=job_id, state=self._state if last else "RUNNING", step=self._committed)

    def metrics(self, job_id, names=None, after_step=0, max_points=1000):
        steps = list(range(after_step + 1, self._committed + 1))
        losses = [float("nan") if step == 2 else 1.0 / step for step in steps]
        validation = [0.5 if step == 3 else None for step in steps]
        return MetricSeries(steps=steps, series={"loss": losses, "validation_loss": validation})


class Noted:
    def __init__(self):
        self.rows, self.ended = [], []

    def write(self, step, row):
        self.rows.append((step, dict(row)))

    def close(self, succeeded):
        self.ended.append(succeeded)


def test_tracking_writes_each_step_once_with_its_finite_numbers():
    first, second = Noted(), Noted()
    done = track(Growing(0, 2, 2, 4), "j", [first, second], poll_seconds=0.0)
    assert done.state == "SUCCEEDED"
    assert first.rows == [
        (1, {"loss": 1.0}),
        (2, {}),
        (3, {"loss": 1 / 3, "validation_loss": 0.5}),
        (4, {"loss": 0.25}),
    ]
    assert second.rows == first.rows
    assert first.ended == second.ended == [True]


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED"])
def test_tracking_reports_a_job_short_of_its_last_step_as_unsuccessful(state):
    target = Noted()
    track(Growing(1, 2, state=state), "j", [target], poll_seconds=0.0)
    assert (len(target.rows), target.ended) == (2, [False])
