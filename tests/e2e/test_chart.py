"""What Kubernetes and KubeRay would start of the chart, as processes with the commands, users, environment, volumes and
network policies that it renders: a job trains, a pod of nodes is lost, another is drained, all go down."""

import base64
import shutil
from dataclasses import replace

import pytest
import yaml

from tests.deploy import chart
from tests.e2e.containers import Containers
from tests.e2e.forwarder import Forwarder
from tests.e2e.images import missing_programs
from tests.e2e.installation import Installation, check_rights, reaches
from tests.e2e.manta import PAIR

pytestmark = pytest.mark.soak  # tests/e2e/test_compose.py has the same commands in `make test`

STEPS, SAVED_EVERY = 240, 60
NODES = ("manta-cpu", "manta-more")
PODS = ("manta", "manta-head-svc", "manta-postgresql", *NODES)
API, DATABASE, GCS = 8400, 5432, 6379


@pytest.fixture(scope="module")
def manifests(folder):
    """Of the example for one node, with a second group, a claim with data, and the name by which the test calls."""
    values = yaml.safe_load((chart.CHART / "examples" / "one-node.yaml").read_text(encoding="utf-8"))
    (group,) = values["ray"]["workerGroups"]
    values["ray"]["workerGroups"] = [{**group, "slots": 2}, {**group, "name": "more", "slots": 2}]
    values["data"] = [{"claim": "corpora", "mountPath": "/data"}]
    values["controlPlane"] = {"allowedHosts": ["127.0.0.1"]}
    (folder / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return chart.render(folder / "values.yaml")


@pytest.fixture(scope="module")
def engine(network, folder, manifests, corpus):
    for reason in missing_programs():
        pytest.skip(reason)
    claim = folder / "volumes" / "corpora"
    claim.mkdir(parents=True)
    shutil.copy(corpus, claim / "words.txt")
    addresses = {name: f"{network.subnet}.{number}" for number, name in enumerate(sorted(PODS), start=2)}
    pods = chart.containers(manifests, addresses)
    # Kubernetes starts a container again until what it needs is there.
    for name in ("manta-migrate", *NODES):
        needed = "manta-head-svc" if name in NODES else "manta-postgresql"
        pods[name] = replace(pods[name], needs={**pods[name].needs, needed: "healthy"})
    pods["manta"] = replace(pods["manta"], published=(API,))  # by the ingress
    made = Containers(network, folder, pods, folder)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def installation(engine, manifests):
    ways = Forwarder("127.0.0.1", (engine.address("manta"), API))
    (keys,) = [each["data"] for each in chart.of_kind(manifests, "Secret") if "admin" in each["data"]]
    url, key = f"http://127.0.0.1:{ways.port}", base64.b64decode(keys["admin"]).decode()
    made = Installation(engine, "/data/words.txt", url, key)
    yield made
    made.client.close()
    ways.close()


def test_chart_job_survives_the_end_of_a_pod(installation, engine):
    job = installation.submit(installation.spec(STEPS, PAIR, checkpoint={"every_steps": SAVED_EVERY}))
    installation.trains_on_without_its_worker(job, SAVED_EVERY, STEPS)
    *_, newest = installation.client.checkpoints(job).items
    assert newest.path.startswith(f"/checkpoints/{job}/")


def test_chart_pod_that_terminates_is_drained_first(installation, engine):
    job = installation.submit(installation.spec(100_000, PAIR))
    installation.until_step(job, 1)
    left = installation.worker_of(job)
    assert engine.record(left).before_stop[:2] == ("manta", "drain")
    engine.stop(left)
    assert installation.worker_of(job) != left
    assert len(installation.events(job, "node_draining")) == 1 and not installation.events(job, "recovered")
    installation.until_step(job, installation.client.job(job).step + STEPS)
    installation.client.cancel(job)
    installation.until_state(job, "CANCELLED")
    engine.start(left)
    installation.until_healthy(left)


def test_chart_containers_have_exactly_the_privileges_of_the_chart(engine):
    check_rights(engine)


def test_chart_network_policies_allow_only_what_the_service_needs(engine):
    assert reaches(engine, "manta", "manta-postgresql", DATABASE)
    assert not reaches(engine, NODES[0], "manta-postgresql", DATABASE)
    assert reaches(engine, NODES[0], "manta-head-svc", GCS) and reaches(engine, "manta", "manta-head-svc", GCS)
    assert not reaches(engine, "manta-postgresql", "manta-head-svc", GCS)
    assert not reaches(engine, NODES[0], "manta", API)


# The last: it is gone afterwards.
def test_chart_services_stop_when_asked_and_leave_no_process(engine):
    for name in ("manta", *NODES, "manta-head-svc", "manta-postgresql"):
        engine.stop(name)
    assert engine.processes() == []
