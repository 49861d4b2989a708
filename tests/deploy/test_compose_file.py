"""docker-compose.yml, as an operator or a security reviewer reads it. What its commands do:
tests/e2e/test_compose.py."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from manta.service.identity import may_be_key
from manta.service.settings import DEFAULT_PORT
from tests.deploy import compose_file
from tests.deploy.commands import check_command
from tests.e2e.cluster_apart import MANTA_PORTS, RAY_PORT, RAY_SERVER_PORTS, RAY_WORKER_PORTS

ROOT = compose_file.ROOT
TEXT = compose_file.FILE.read_text(encoding="utf-8")
VARIABLES = {name: f"{name.lower()}-of-a-test" for name in compose_file.required_variables(TEXT)}
DOCUMENT = compose_file.document(VARIABLES)
SERVICES = compose_file.containers(VARIABLES, profiles=("gpu", "tools"))
OURS = {name: each for name, each in SERVICES.items() if each.image.startswith("manta/")}


def test_compose_file_follows_the_compose_specification():
    check = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(compose_file.FILE)]
    done = subprocess.run([sys.executable, *check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_file_without_secrets_is_refused():
    with pytest.raises(compose_file.MissingVariable, match="run deploy/compose/make-env"):
        compose_file.document({})


def test_compose_publishes_only_rest_and_grafana_on_loopback_through_the_gateway():
    published = {name: each.published for name, each in SERVICES.items() if each.published}
    assert published == {"gateway": (DEFAULT_PORT, 3000)}
    assert all(each.startswith("127.0.0.1:") for each in DOCUMENT["services"]["gateway"]["ports"])
    outside = {name for name, words in DOCUMENT["networks"].items() if not (words or {}).get("internal")}
    assert outside == {"public"}
    assert [name for name, each in SERVICES.items() if "public" in each.networks] == ["gateway"]


@pytest.mark.parametrize("name", SERVICES)
def test_compose_container_is_unprivileged_and_limited(name):
    container, words = SERVICES[name], DOCUMENT["services"][re.sub(r"^worker-\d$", "worker", name)]
    assert container.user, "a user who is not root, by number"
    assert container.read_only and not container.capabilities and not container.new_privileges
    assert set(container.limits) == {"cpus", "memory", "pids"}
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "container_name"} & set(words)
    assert words.get("network_mode", "none") == "none"
    assert not [each for each in container.mounts if "docker.sock" in each.source]
    assert [each.target for each in container.mounts if not each.is_volume and not each.read_only] == []


@pytest.mark.parametrize("name", SERVICES)
def test_compose_container_has_a_health_check_or_runs_once(name):
    waited_for = {
        each for container in SERVICES.values() for each, how in container.needs.items() if how == "completed"
    }
    if SERVICES[name].once:
        assert name in waited_for or DOCUMENT["services"][name]["profiles"] == ["tools"]
    else:
        assert SERVICES[name].health and name not in waited_for


def test_compose_images_are_pinned_and_ours_have_the_version_of_the_package():
    for each in SERVICES.values():
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+.*", each.image), each.image
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {each.image.partition(":")[2] for each in OURS.values()} == {re.sub(r"\.dev(\d+)$", r"-dev.\1", version)}


def test_compose_services_get_only_the_secrets_they_need():
    planes, ranks = {"control-1", "control-2"}, {"worker-1", "worker-2", "worker-gpu"}
    for variable, holders in {
        "MANTA_POSTGRES_PASSWORD": {"postgres", "migrate", "admin-key", "prometheus-key", *planes},
        "MANTA_RAY_TOKEN": {"ray-head", *planes, *ranks},
        "MANTA_S3_SECRET_KEY": {"object-store", "bucket", *planes, *ranks},
        "MANTA_ADMIN_KEY": {"admin-key", "manta"},
        "MANTA_PROMETHEUS_KEY": {"prometheus-key", "prometheus"},
        "MANTA_GRAFANA_PASSWORD": {"grafana"},
    }.items():
        given = {name: " ".join(each.environment.values()) for name, each in SERVICES.items()}
        assert {name for name, values in given.items() if VARIABLES[variable] in values} == holders


@pytest.mark.parametrize("name", OURS)
def test_compose_commands_and_variables_are_known_to_their_programs(name):
    check_command(OURS[name].command)
    known = set(re.findall(r"MANTA_[A-Z0-9_]+", (ROOT / "src/manta/service/settings.py").read_text()))
    assert {each for each in OURS[name].environment if each.startswith("MANTA_")} <= known


def test_compose_ports_are_those_the_documentation_opens():
    first, last = RAY_WORKER_PORTS.split("-")
    ports = {**RAY_SERVER_PORTS, "min-worker-port": first, "max-worker-port": last}
    for name in ("ray-head", "worker-1", "worker-gpu"):
        assert {f"--{option}={port}" for option, port in ports.items()} <= set(SERVICES[name].command)
    assert f"--port={RAY_PORT}" in SERVICES["ray-head"].command
    assert SERVICES["control-1"].environment["MANTA_PORTS"] == MANTA_PORTS


def test_control_planes_differ_in_nothing_but_their_place():
    first, second = (SERVICES[name] for name in ("control-1", "control-2"))
    assert first.command == second.command and first.mounts == second.mounts
    assert {key for key in first.environment if first.environment[key] != second.environment[key]} == {"MANTA_HOME"}


def test_make_env_creates_secrets_and_certificate_and_changes_nothing_again(tmp_path):
    def make(*names):
        script = [ROOT / "deploy/compose/make-env.sh", *names]
        subprocess.run(
            script, env={**os.environ, "MANTA_COMPOSE_FOLDER": str(tmp_path)}, check=True, capture_output=True
        )
        return (tmp_path / ".env").read_text(), (tmp_path / "deploy/compose/tls/manta.pem").read_text()

    made = make("train.example.org")
    variables = compose_file.variables_of(made[0])
    assert set(variables) >= compose_file.required_variables(TEXT) and variables["MANTA_NAME"] == "train.example.org"
    assert all(may_be_key(variables[each]) for each in ("MANTA_ADMIN_KEY", "MANTA_PROMETHEUS_KEY"))
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    assert (tmp_path / "deploy/compose/tls").stat().st_mode & 0o077 == 0, "nobody else reaches the private key"
    assert make() == made
    files = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert files == {".env", "deploy/compose/tls/manta.pem"}, "and no half of one"
    yaml.safe_load(compose_file.substituted(TEXT, variables))
