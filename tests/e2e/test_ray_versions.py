"""The oldest Ray that we take and the newest that there is: nodes and control plane run either."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement
from s3_server import environment_of

from manta.service.doctor import DISTRIBUTION
from tests.e2e.cluster_apart import ApartCluster, ApartService
from tests.e2e.forwarder import Forwarder
from tests.e2e.manta import EVERY_STEP
from tests.e2e.other_ray import RayMismatch

NODES = 3
STEPS = 40
LAYOUT = (2, 1, 2)
pytestmark = pytest.mark.soak


def ours() -> Requirement:
    """What we need of Ray."""
    needed = map(Requirement, importlib.metadata.requires(DISTRIBUTION))
    return next(each for each in needed if each.name == "ray")


def oldest() -> str:
    """The oldest that we take, for pip."""
    (bound,) = [each.version for each in ours().specifier if each.operator == ">="]
    return f"ray=={bound}"


@pytest.mark.parametrize("wanted", [oldest(), "ray"])
def test_job_survives_losses_of_ranks_agents_nodes_and_service_on_each_ray_version(
    network, tmp_path_factory, corpus, object_store, wanted
):
    folder = tmp_path_factory.mktemp("machines")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    ray = RayMismatch(folder / "environment", wanted)
    if ray.unavailable is not None:
        pytest.skip(f"{wanted} cannot be installed: {ray.unavailable}")
    way = Forwarder(network.address, ("127.0.0.1", int(object_store.url.rpartition(":")[2])))
    cluster = ApartCluster(network, folder, corpus, NODES, ray=ray)
    cluster.environment = environment_of(f"http://{network.address}:{way.port}")
    cluster.start()
    places = {"MANTA_CHECKPOINTS": f"s3://checkpoints/{ray.version}", "MANTA_DATA_ROOTS": "/home/data"}
    apart = ApartService(network, folder, cluster, {**cluster.environment, **places})
    try:
        assert cluster.head.run(*cluster.head.python("-c", "import ray; print(ray.__version__)")).stdout.strip() == (
            ray.version
        )
        apart.until_nodes(NODES)
        clean, job = (apart.submit(apart.spec(STEPS, LAYOUT, checkpoint=EVERY_STEP)) for _ in range(2))
        apart.until_state(clean, "SUCCEEDED")
        apart.lose_all_in_turn(job)
        assert apart.curve(job) == apart.curve(clean)
    finally:
        apart.close()
        cluster.close()
        way.close()
