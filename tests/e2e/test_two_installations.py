"""Two services with two homes on one Ray cluster: neither sees, sweeps or ends what belongs to the other."""

import psutil
import pytest

from benchmarks.support import own_processes
from manta.api.cli.service import start_service, stop_service
from manta.api.client import Client
from manta.api.serving.local_service import running_service
from manta.service.cluster.ray_head import RayHead
from manta.service.settings import Settings
from manta.workers.paths import Paths
from tests.e2e.manta import PAIR, SLOW_SECONDS


@pytest.fixture
def second(manta, tmp_path, monkeypatch):
    """Starts, and starts again, a service of another home on the Ray of `manta`."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(manta.paths.ray_token))
    home, paths = tmp_path / "home", Paths.of(tmp_path / "home")

    def start():
        running = running_service(home)
        if running is not None:
            process = psutil.Process(int(running["pid"]))
            process.kill()
            process.wait(10)
        ray = RayHead(manta.home).record().address
        start_service(Settings(home, allow_faults=True), "127.0.0.1", 0, None, ray)
        return Client.of_home(home)

    start.paths = paths
    yield start
    stop_service(home)
    for process in own_processes.zygotes(paths):
        process.parent().kill()  # the daemon: with somebody else's Ray it would live on
        process.wait(10)
    paths.remove_snapshots()
    paths.remove_runtime_folder()


@pytest.mark.soak
def test_two_installations_on_one_ray_leave_each_other_alone(manta, second):
    first_job = manta.submit_held(manta.spec(steps=20_000, layout=PAIR), 1)
    pids, snapshots = manta.pids(first_job), manta.paths.snapshot_folder(first_job)

    client = second()
    job = client.submit(manta.spec(steps=20_000, layout=(2, 1, 1))).id
    manta.until("the second's job", lambda: client.job(job).step >= 1)
    client.inject(job, "slow", 0, seconds=SLOW_SECONDS)  # it leaves the cores to the services that come and go
    own = [rank.pid for rank in client.ranks(job).items]
    client = second()  # what it does not know would have been swept
    manta.kill_service()
    manta.start()
    for running, each in ((client, job), (manta.client, first_job)):
        step = running.job(each).step
        manta.until("another step", lambda running=running, each=each, step=step: running.job(each).step > step)
        assert running.job(each).generation == 1
    assert manta.pids(first_job) == pids and [rank.pid for rank in client.ranks(job).items] == own
    client.cancel(job)
    manta.until("its end", lambda: client.job(job).state == "CANCELLED")
    manta.until_step(first_job, manta.client.job(first_job).step + 1)
    assert snapshots.is_dir() and not second.paths.snapshot_folder(job).exists()
    manta.cancel(first_job)
