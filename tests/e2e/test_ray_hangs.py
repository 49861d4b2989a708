"""Ray's head stands still for a while, as on a machine that swaps, and goes on: no job notices."""

import contextlib

import psutil
import pytest

from manta.service.cluster.ray_head import RayHead
from tests.e2e.manta import LASTING, PAIR

STEPS_MEANWHILE = 4


@pytest.fixture
def head(manta):
    """The processes of Ray's head: its control store, and the one that looks after its node."""
    family = psutil.Process(RayHead(manta.home).record().pid).children(recursive=True)
    processes = [process for process in family if process.name() in ("gcs_server", "raylet")]
    assert len(processes) == 2
    yield processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@LASTING
def test_paused_ray_head_costs_a_running_job_nothing(manta, head, seconds):
    job = manta.submit_held(manta.spec(steps=20_000, layout=PAIR), 1)
    pids = manta.pids(job)
    for process in head:
        process.suspend()
    manta.until("Ray being missed", lambda: not manta.answers())
    manta.until_step(job, manta.client.job(job).step + STEPS_MEANWHILE)
    manta.endure(seconds / 2)  # Ray itself gives up a head that stands still for a minute
    for process in head:
        process.resume()
    manta.until("Ray being back", manta.answers)
    other = manta.submit(manta.spec(steps=2, layout=(1, 1, 1)))
    manta.until_state(other, "SUCCEEDED")
    assert manta.pids(job) == pids and manta.client.job(job).generation == 1
    assert not manta.events(job, "rank_lost") and not manta.events(job, "node_lost"), manta.story(job)
    manta.cancel(job)
