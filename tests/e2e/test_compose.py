"""The services of docker-compose.yml, as processes with the commands, users, environment, mounts and networks that the
file says: they come up healthy, train a job on two machines that share no folder but that of the data, lose a worker
and a control plane, and go down. Grafana is left out."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace

import httpx
import psutil
import pytest

from manta.api.client import Client
from manta.api.rest_version import HEADER, REST
from manta.service.cluster.existing_ray import HEAD_NOT_PERSISTENT
from tests.deploy import compose_file
from tests.e2e.cluster_apart import MANTA_PORTS
from tests.e2e.containers import Containers
from tests.e2e.forwarder import Forwarder
from tests.e2e.images import missing_programs
from tests.e2e.installation import Installation, check_rights, reaches
from tests.e2e.machines import ROOT
from tests.e2e.manta import EVERY_STEP, PAIR, SECONDS, SLOW_SECONDS

STEPS, SAVED_EVERY = 100, 25
WORKERS, PLANES = ("worker-1", "worker-2"), ("control-1", "control-2")
RAY = ("ray-head", *WORKERS)
SLOTS = 1
"""Of each worker, so that a job of two ranks is on both."""


@pytest.fixture(scope="module")
def checkout(folder):
    """What the file mounts, with what make-env.sh writes."""
    for reason in missing_programs():
        pytest.skip(reason)
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    command = [ROOT / "deploy/compose/make-env.sh"]
    subprocess.run(command, env={**os.environ, "MANTA_COMPOSE_FOLDER": str(folder)}, check=True)
    return folder


@pytest.fixture(scope="module")
def variables(checkout, network, corpus):
    (checkout / "data").mkdir(mode=0o755)
    shutil.copy(corpus, checkout / "data" / "words.txt")
    small = {"MANTA_API_NET": network.subnet, "MANTA_WORKER_SLOTS": str(SLOTS), "MANTA_WORKER_SHARED_MEMORY": "300m"}
    return {**compose_file.variables_of((checkout / ".env").read_text()), **small}


@pytest.fixture(scope="module")
def engine(network, checkout, variables):
    containers = compose_file.containers(variables, profiles=("tools",))
    for name in PLANES:  # a test holds its job, which is short
        environment = {**containers[name].environment, "MANTA_ALLOW_FAULTS": "1"}
        containers[name] = replace(containers[name], environment=environment)
    made = Containers(network, checkout, containers, checkout, on_request=["manta"])
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def installation(engine, checkout, variables):
    """Reached as the published port is: from this machine, with TLS."""
    ways = Forwarder("127.0.0.1", (engine.address("gateway"), 8400))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(checkout / "deploy/compose/tls/manta.pem"))
        made = Installation(engine, "/data/words.txt", f"https://127.0.0.1:{ways.port}", variables["MANTA_ADMIN_KEY"])
        yield made
    made.client.close()
    ways.close()


def spec_of(installation, layout):
    """A job whose bits do not depend on the number of its replicas."""
    return installation.spec(
        STEPS,
        layout,
        train={"deterministic": "elastic"},
        parallel={"zero": 0},
        elastic={"min_data": 1, "max_data": 2},
        checkpoint={**EVERY_STEP, "every_steps": SAVED_EVERY},
    )


def with_daemon(engine):
    """The containers in which ranks can run."""
    return {name for name in engine.names() if any(map(is_daemon, engine.processes(name)))}


def is_daemon(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        return process.name() == "ray::NodeDaemon"
    return False


def test_job_is_submitted_with_the_command_and_survives_the_end_of_a_worker(installation, engine):
    installation.until("both workers", lambda: installation.client.cluster().totals["free"] == SLOTS * len(WORKERS))
    for worker in WORKERS:  # slots are there before that, and what does not run yet would not be held
        installation.until(f"the zygote of {worker}", lambda worker=worker: installation.zygotes(worker))

    def submit(document):
        submitted = engine.once("manta", "submit", "-", "--json", text=json.dumps(document))
        assert submitted.returncode == 0, submitted.stderr
        return json.loads(submitted.stdout)["id"]

    with installation.starting(spec_of(installation, PAIR), submit) as (job, inject):
        inject("slow", 0, at_step=SAVED_EVERY + 1, seconds=SLOW_SECONDS)  # until its worker is lost
    installation.trains_on_without_its_worker(job, SAVED_EVERY, STEPS)
    *_, newest = installation.client.checkpoints(job).items
    assert newest.path.startswith(f"s3://manta/checkpoints/{job}/")
    (lost,), (recovered,) = (installation.events(job, kind) for kind in ("node_lost", "recovered"))
    assert lost.data["ranks"] == [0] and installation.client.job(job).restarts == 1
    assert recovered.data["steps_redone"] <= 1
    assert recovered.data["source"] == "memory", "that of the rank on the other worker is the same"
    installation.until("a daemon on each worker", lambda: with_daemon(engine) >= set(WORKERS))
    assert with_daemon(engine) == set(WORKERS), "ranks run neither on the head nor beside a control plane"
    undisturbed = installation.submit(spec_of(installation, (1, 1, 1)))
    installation.until_state(undisturbed, "SUCCEEDED")
    assert installation.curve(job) == installation.curve(undisturbed)


def test_doctor_names_closed_ports_with_both_ends(engine):
    closed, other = WORKERS
    with engine.closed(closed, MANTA_PORTS):
        said = engine.once("manta", "doctor", seconds=2 * SECONDS).stdout
    found = re.search(r"FAIL  ports: ports 20\d\d\d, .* of node (\S+) \((\S+)\) cannot be", said)
    assert found and found.groups() == (closed, engine.address(closed)), said
    assert f"node {other} ({engine.address(other)})" in said and said.count("FAIL  ports") == 1
    assert "-> open the ports of MANTA_PORTS between all machines" in said
    assert f"WARN  cluster: {HEAD_NOT_PERSISTENT}" in said


def test_compose_containers_have_exactly_the_privileges_of_the_file(engine):
    check_rights(engine)


def test_compose_networks_are_isolated_from_each_other(engine):
    assert reaches(engine, "control-1", "postgres", 5432) and not reaches(engine, "worker-1", "postgres", 5432)
    assert reaches(engine, "worker-1", "ray-head", 6379) and not reaches(engine, "gateway", "ray-head", 6379)
    assert reaches(engine, "gateway", "control-2", 8400)
    assert reaches(engine, "object-store", "worker-1", 6380) and not reaches(engine, "prometheus", "object-store", 9000)
    assert engine.run("worker-1", "getent", "hosts", "postgres").returncode != 0


def test_compose_users_get_keys_of_their_own(installation, engine):
    made = engine.once("manta", "keys", "create", "laptop of ada", "--user", "ada", "--scope", "submit")
    assert made.returncode == 0, made.stderr
    with Client(installation.client.url, key=made.stdout.strip()) as ada:
        assert ada.jobs().items


def test_browser_changes_something_through_the_gateway_from_its_own_pages_only(installation):
    url = installation.client.url
    with httpx.Client(base_url=url) as browser:
        assert browser.get(installation.client.link().path).status_code == 200
        for origin, status in ((url, 404), (url.replace("https", "http"), 403), ("https://127.0.0.1:3000", 403)):
            headers = {"Origin": origin, HEADER: str(REST)}
            assert browser.post("/v1/jobs/job_000000000000/cancel", headers=headers).status_code == status, origin


def test_audit_has_the_address_of_the_client_and_not_of_the_gateway(installation, engine, network):
    installation.client.create_project("vision")
    # An answer waits for its line for a while only, on a disk that is slow.
    (line,) = installation.until("its line", lambda: installation.client.audit(target="vision").items)
    assert (line.operation, line.address) == ("create_project", network.address)


def test_prometheus_has_numbers_of_both_control_planes(installation, engine):
    def scraped():
        query = "http://127.0.0.1:9090/api/v1/query?query=up"
        samples = json.loads(engine.run("prometheus", "wget", "-q", "-O", "-", query).stdout)["data"]["result"]
        return {each["metric"]["instance"] for each in samples if each["value"][1] == "1"}

    installation.until("the first numbers", lambda: scraped() >= {f"{each}:8400" for each in PLANES})


# From here on there is one control plane less.
def test_gateway_switches_to_the_other_control_plane(installation, engine):
    engine.kill(PLANES[0])
    assert installation.client.ready() and engine.health("gateway").returncode == 0


# The last: it is gone afterwards.
def test_compose_services_stop_when_asked_and_leave_no_process(engine):
    for name in reversed(engine.names()):
        code = engine.stop(name)
        assert code in (0, 1 if name in RAY else signal.SIGTERM, 128 + signal.SIGTERM), (name, engine.log(name)[-2000:])
    assert engine.processes() == []
