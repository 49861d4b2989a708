"""A Ray cluster whose nodes are other machines: with other users, homes and memory, and the control plane on one more,
without torch. They share no folder: checkpoints are in an object store, jobs in PostgreSQL."""

import re

import pytest
from s3_server import environment_of

from manta.api.client import ServiceUnreachable
from manta.service.cluster.existing_ray import HEAD_NOT_PERSISTENT
from tests.e2e.cluster_apart import MANTA_PORTS, OPEN, SLOTS, ApartCluster, ApartService
from tests.e2e.forwarder import Forwarder
from tests.e2e.machines import ROOT
from tests.e2e.manta import EVERY_STEP, LONG_HOLD_SECONDS, SECONDS

pytestmark = pytest.mark.soak  # tests/e2e/test_compose.py trains where nothing is shared in `make test`

NODES = 3
STEPS = 60
LAYOUT = (2, 1, 2)


@pytest.fixture(scope="module")
def cluster(network, folder, corpus, object_store):
    ways = Forwarder(network.address, ("127.0.0.1", int(object_store.url.rpartition(":")[2])))
    made = ApartCluster(network, folder, corpus, NODES)
    made.environment = environment_of(f"http://{network.address}:{ways.port}")
    made.start()
    yield made
    made.close()
    ways.close()


@pytest.fixture(scope="module")
def apart(network, folder, cluster, postgres):
    database = Forwarder(network.address, f"{postgres.folder}/.s.PGSQL.5432")
    name = postgres.make_empty()
    environment = {
        **cluster.environment,
        "MANTA_CHECKPOINTS": "s3://checkpoints/apart",
        "MANTA_DATA_ROOTS": "/home/data",
        "MANTA_DATABASE_URL": f"postgresql://manta@{network.address}:{database.port}/{name}",
    }
    made = ApartService(network, folder, cluster, environment)
    yield made
    made.close()
    database.close()


@pytest.fixture(autouse=True)
def all_nodes_are_there(apart):
    """Whatever the test before did to one."""
    apart.until_nodes(NODES)


@pytest.fixture(scope="module")
def clean(apart):
    """A job to which nothing happens."""
    job = apart.submit(spec(apart))
    apart.until_state(job, "SUCCEEDED")
    return job


def spec(apart):
    return apart.spec(STEPS, LAYOUT, checkpoint={**EVERY_STEP, "every_steps": 20})


def test_job_trains_on_machines_that_share_nothing(apart, cluster, clean):
    assert len(apart.curve(clean)) == STEPS
    (newest,) = (row for row in apart.client.checkpoints(clean).items if row.state == "complete" and row.step == STEPS)
    assert newest.path.startswith(f"s3://checkpoints/apart/{clean}/")
    for machine in (cluster.head, apart.machine):
        assert not [each for each in machine.processes() if each.name().startswith("ray::NodeDaemon")], "no ranks there"
    assert not (apart.home / "jobs" / clean / "checkpoints").exists()


def test_node_drains_itself_on_request_as_before_a_pod_ends(apart, cluster, clean):
    job = apart.submit(spec(apart))
    apart.hold(job, 0, step=5)
    leaving = cluster.node_of(apart.pids(job)[3])
    said = leaving.run(*leaving.python("-m", "manta.api.cli", "drain", "--this-node", "--wait", "--deadline", "60"))
    assert said.returncode == 0, said.stderr
    assert not [each for each in leaving.processes() if each.name().startswith("ray::Agent")]
    leaving.power_off()
    apart.until_state(job, "SUCCEEDED")
    assert (apart.curve(job), apart.client.job(job).restarts) == (apart.curve(clean), 0)
    cluster.start_node(leaving)


def test_output_of_ranks_on_separate_machines_reaches_the_logs(apart, cluster):
    job = apart.submit(spec(apart))
    apart.inject(job, "exception", 1, at_step=3)
    apart.until_state(job, "SUCCEEDED")
    lines = [line.text for line in apart.client.logs(job, rank=1).items]
    assert any("Traceback" in line for line in lines)
    assert not [path for node in cluster.nodes for path in node.disk.rglob("rank-*.jsonl")]
    assert SLOTS == 2


def test_doctor_reports_closed_ports_before_any_job_runs(apart, cluster):
    healthy = apart.doctor()
    assert f"ok    ports: {NODES} nodes reach each other" in healthy, healthy
    assert f"WARN  cluster: {HEAD_NOT_PERSISTENT}" in healthy and HEAD_NOT_PERSISTENT in apart.log.read_text()
    closed, other, *_ = cluster.nodes
    closed.let_in([ports for ports in OPEN if ports != MANTA_PORTS])  # what was connected before stays so
    try:
        said = apart.doctor()
    finally:
        closed.let_in(OPEN)
    assert re.search(rf"FAIL  ports: ports 20\d\d\d, .* of node {closed.name} \({closed.address}\) cannot be", said), (
        said
    )
    assert f"node {other.name} ({other.address})" in said and said.count("FAIL  ports") == 1
    assert "-> open the ports of MANTA_PORTS between all machines" in said


def test_job_waiting_for_a_node_with_closed_ports_names_both_ends(apart, cluster):
    closed, *_ = cluster.nodes
    closed.let_in([ports for ports in OPEN if ports != MANTA_PORTS])
    apart.kill_service()  # what was connected before stays so
    apart.start()
    try:
        apart.until_nodes(NODES - 1, exactly=True)
        job = apart.submit(apart.spec(STEPS, (2, 1, NODES)))
        named = re.compile(rf"port 20\d\d\d of node {closed.name} \({closed.address}\) cannot be reached")
        waiting = apart.until("why", lambda: named.search(said := apart.client.job(job).message or "") and said)
        assert f"from the control plane ({apart.machine.address})" in waiting and "MANTA_PORTS" in waiting
    finally:
        closed.let_in(OPEN)
    apart.until_state(job, "SUCCEEDED")


def test_rank_agent_node_and_control_plane_are_killed_in_turn_and_the_bits_stay(apart, clean):
    job = apart.submit(spec(apart))
    apart.lose_all_in_turn(job)
    assert apart.curve(job) == apart.curve(clean)


def test_job_resumes_from_its_checkpoint_when_the_ray_head_and_its_state_are_lost(apart, cluster, clean):
    job = apart.submit(spec(apart))
    apart.hold(job, 0, step=25, seconds=LONG_HOLD_SECONDS)
    cluster.head.power_off()
    cluster.start_head()
    for node in cluster.nodes:  # as the operator of a cluster does
        node.power_off()
        cluster.start_node(node)
    apart.until("a generation from the checkpoint", lambda: from_checkpoint(apart, job), 3 * SECONDS)
    apart.until_state(job, "SUCCEEDED")
    assert apart.curve(job) == apart.curve(clean)


def from_checkpoint(apart, job):
    """Whether the job was begun anew from its checkpoint; the service may be away for a moment."""
    try:
        return apart.events(job, "generation_started")[-1].data["resume_source"] == "checkpoint"
    except ServiceUnreachable:
        return False


def test_nodes_without_manta_say_so_and_train_with_the_code_that_is_shipped(network, folder, corpus, apart, cluster):
    """On SQLite, and with a cluster of its own beside the other one."""
    disks = folder / "shipped"
    disks.mkdir(mode=0o755)
    bare = ApartCluster(network, disks, corpus, 1, without=[ROOT / "src"])
    bare.environment = cluster.environment
    bare.start()
    places = {"MANTA_CHECKPOINTS": "s3://checkpoints/shipped", "MANTA_DATA_ROOTS": "/home/data"}
    service = ApartService(network, disks, bare, {**cluster.environment, **places})
    try:
        job = service.submit(service.spec(10, (2, 1, 1)))
        service.until("why it waits", lambda: "has no Manta" in (service.client.job(job).message or ""))
        service.kill_service()
        service.serve(MANTA_SHIP_CODE="1")
        service.until("the service", service.answers, 3 * SECONDS)
        service.until_state(job, "SUCCEEDED")
        here = apart.submit(apart.spec(10, (2, 1, 1)))
        apart.until_state(here, "SUCCEEDED")
        assert service.curve(job) == apart.curve(here)
    finally:
        service.close()
        bare.close()
