"""One Ray for all tests that need one, started once by the code under test; and a fresh job database for every test."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.ray_head import RayHead
from manta.service.control import control_plane
from manta.service.control.control_plane import ControlPlane
from manta.service.control.options import ControlPlaneOptions
from manta.service.leases.held import Leases
from manta.service.states import JobState
from manta.service.store import Job, Store, jobs, leases
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from tests.service.support.control_planes import IdleNodeWatch
from tests.service.support.fake_cluster import FakeCluster

ROOT = Path(__file__).parents[2]
SLOTS = 4
"""Ray starts a process for each before it is needed."""
ZYGOTE_OPTIONS = (
    "--entry=trainer=zygote_entries:trainer",
    "--entry=store=manta.workers.node.rendezvous:run",
    "--entry=peak=manta.workers.accounting.device_peak:run",
)
ZYGOTE_ENVIRONMENT = {"PYTHONPATH": f"{ROOT}/tests/workers/support"}


@dataclass
class RunningRay:
    """The Ray of the test session, with SLOTS slots."""

    head: RayHead
    home: Path
    ray: Any
    cluster: Cluster
    zygote_options: tuple[str, ...]
    """Arguments of `daemons.ensure` that put a stand-in in the place of the trainer."""
    zygote_environment: dict[str, str]


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRay]:
    """Our Ray head, connected, with a daemon on its node."""
    home = tmp_path_factory.mktemp("home")
    head = RayHead(home, slots=SLOTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # for actors that tests bring
        head.ensure()
    try:
        _have_ray_read_its_settings_anew(home)
        ray = head.connect()
        cluster = Cluster.connected(ray, Paths.of(home))
        yield RunningRay(head, home, ray, cluster, ZYGOTE_OPTIONS, ZYGOTE_ENVIRONMENT)
        asyncio.run(cluster.daemons.end_all())
        ray.shutdown()
    finally:
        head.stop()
        Paths.of(home).remove_runtime_folder()


def _have_ray_read_its_settings_anew(home: Path) -> None:
    """Ray looks once, when it is imported, how it lets in and is let in; another test may have imported it by now."""
    if "ray" in sys.modules:
        from ray._raylet import Config

        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(Paths.of(home).ray_token))
        Config.initialize("")


DOCUMENT = {
    "name": "small",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 10, "global_batch_size": 4},
}


@pytest.fixture
def make_spec():
    """Makes the small spec, with some of its sections replaced."""
    return lambda **changes: parse_job_spec({**DOCUMENT, **changes})


@pytest.fixture
def submit(store: Store, make_spec) -> Callable[..., Job]:
    """Stores a job made of the small spec, with some of its sections replaced."""
    return lambda **changes: store.write(lambda session: jobs.create(session, make_spec(**changes)))[0]


@pytest.fixture
def started(store: Store, submit) -> Job:
    """A STARTING job."""
    job_id = submit().id
    return store.write(lambda session: jobs.transition(session, job_id, JobState.STARTING))


@pytest.fixture
def own_leases(store: Store) -> Leases:
    """The leases of a control plane beside another one, on any database; for it no time passes."""
    held = Leases(store, "me", clock=lambda: 0.0)
    held.join("host:one", "ray-1")
    store.write(lambda session: leases.join(session, "other", "host:two", "ray-1", False))
    return held


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two simulated nodes, to which control planes of this process connect."""
    made = FakeCluster(tmp_path, node_a=4, node_b=4)
    monkeypatch.setattr(control_plane.Cluster, "connected", classmethod(lambda cls, *anything, **more: made))
    monkeypatch.setattr(control_plane, "NodeWatch", IdleNodeWatch)
    return made


@pytest.fixture
def start(cluster, tmp_path, database_url):
    """Starts a control plane on the database of `store`."""
    started = []

    def make(**options):
        head = SimpleNamespace(connect=lambda namespace: None)
        plane = ControlPlane(tmp_path, head, ControlPlaneOptions(database_url=database_url, **options))
        started.append(plane)
        plane.start()
        return plane

    yield make
    for plane in started:
        plane.stop()
