"""A Ray cluster of other machines whose head keeps what it knows in Redis: its end is no end of anything else."""

import pytest
from s3_server import environment_of

from manta.service.cluster.existing_ray import HEAD_IS_PERSISTENT
from manta.service.cluster.ray_private import RECONNECT_SECONDS
from tests.e2e.cluster_apart import ApartCluster, ApartService
from tests.e2e.forwarder import Forwarder
from tests.e2e.manta import EVERY_STEP, SECONDS
from tests.e2e.redis_server import NOT_FOUND, RedisServer

NODES = 2
STEPS = 60
LAYOUT = (2, 1, 2)
LONG_SECONDS = 70.0
"""More than Ray's processes wait for a head by themselves."""
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def redis(network):
    if not RedisServer.is_installed():
        pytest.skip(NOT_FOUND)
    made = RedisServer(network.address)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(network, folder, corpus, object_store, redis):
    way = Forwarder(network.address, ("127.0.0.1", int(object_store.url.rpartition(":")[2])))
    made = ApartCluster(network, folder, corpus, NODES)
    made.redis = redis
    made.environment = {**environment_of(f"http://{network.address}:{way.port}"), RECONNECT_SECONDS: "600"}
    made.start()
    yield made
    made.close()
    way.close()


@pytest.fixture(scope="module")
def apart(network, folder, cluster):
    places = {"MANTA_CHECKPOINTS": "s3://checkpoints/redis", "MANTA_DATA_ROOTS": "/home/data"}
    made = ApartService(network, folder, cluster, {**cluster.environment, **places})
    made.until_nodes(NODES)
    yield made
    made.close()


def spec(apart):
    return apart.spec(STEPS, LAYOUT, checkpoint=EVERY_STEP)


def starts(apart):
    """How often the service has been started."""
    return apart.log.read_text().count(HEAD_IS_PERSISTENT)


@pytest.fixture(scope="module")
def clean(apart):
    """The curve of a job to which nothing happens."""
    job = apart.submit(spec(apart))
    apart.until_state(job, "SUCCEEDED")
    return apart.curve(job)


def test_job_trains_on_without_a_head_and_replaces_a_rank(apart, cluster, clean, kill):
    assert starts(apart), "the service says what the end of the head would mean"
    job, before = apart.submit(spec(apart)), starts(apart)
    apart.hold(job, 0, step=5)
    cluster.head.power_off()
    apart.until_step(job, apart.client.job(job).step + 3)
    assert not apart.events(job, "recovered"), "the trainers do not need it"
    kill(apart.pids(job)[3])
    (killed,) = apart.until("the recovery", lambda: apart.events(job, "recovered"))
    assert killed.data["steps_redone"] <= 1 and not cluster.head.processes(), "before there is a head again"
    apart.hold(job, 0, step=apart.client.job(job).step + 1)
    cluster.an_agent_on(cluster.nodes[0]).kill()
    apart.until("the job recovering", lambda: apart.client.job(job).state == "RECOVERING")
    cluster.start_head()
    apart.until("the second recovery", lambda: len(apart.events(job, "recovered")) == 2, 3 * SECONDS)
    apart.until_state(job, "SUCCEEDED")
    assert apart.curve(job) == clean
    assert all("memory" in event.data["source"] for event in apart.events(job, "recovered")), apart.story(job)
    assert starts(apart) == before


def test_work_that_needs_the_ray_head_is_done_once_the_head_is_back(apart, cluster, clean):
    job, before = apart.submit(spec(apart)), starts(apart)
    apart.hold(job, 0, step=5)
    cluster.head.power_off()
    later = apart.submit(spec(apart))
    apart.until_step(job, STEPS)
    apart.endure(LONG_SECONDS)
    assert apart.client.job(later).state == "QUEUED"
    cluster.start_head()
    for each in (job, later):
        apart.until_state(each, "SUCCEEDED")
        assert apart.curve(each) == clean
        assert not apart.events(each, "recovered")
    assert starts(apart) == before
