"""What the Helm chart gives away: no privilege, no secret where others read it, nothing that is not needed."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from manta.service.settings import SECRETS, Settings
from manta.workers import settings as workers_settings
from tests.deploy.chart import EXAMPLES, containers, of_kind, pods, render
from tests.deploy.commands import check_command

GIVEN = {
    "manta-database": {"url": "postgresql://me:hidden@there/manta"},
    "manta-redis": {"password": "hidden-password"},
    "manta-bucket": {"AWS_ACCESS_KEY_ID": "hidden-id", "AWS_SECRET_ACCESS_KEY": "hidden-key"},
}
"""Secrets that the examples take for granted."""
HIDDEN = {
    *SECRETS,
    "RAY_AUTH_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "POSTGRES_PASSWORD",
    "REDIS_PASSWORD",
}
OTHERS = {
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_memory_monitor_refresh_ms", "RAY_REDIS_ADDRESS",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3",
    "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", "POSTGRES_INITDB_ARGS", "PGDATA",
}  # fmt: skip
"""Variables that Ray, botocore and PostgreSQL's image read."""


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def manifests(request):
    """What an example renders."""
    return render(request.param)


class Recording(dict):
    """An environment that remembers what it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


@pytest.fixture
def settings_known(monkeypatch):
    """Names of all variables that Manta reads."""
    service, worker = Recording(), Recording()
    Settings.from_environment(service)
    monkeypatch.setattr(workers_settings.os, "environ", worker)
    workers_settings.read_pod()
    return service.asked | {name for name in worker.asked if name.startswith("MANTA_")}


def test_chart_pods_run_unprivileged(manifests):
    for pod in pods(manifests):
        own, spec = pod.spec["securityContext"], pod.spec
        assert own["runAsNonRoot"] and own["runAsUser"] > 0 and own["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        may_ask_kubernetes = spec.get("automountServiceAccountToken", True)
        assert not may_ask_kubernetes or "serviceAccountName" in spec or pod.name.endswith("/head"), pod.name
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


def test_chart_head_without_autoscaler_gets_no_kubernetes_account():
    for values, asks in (("gpu-pool", False), ("several-pools", True)):
        (path,) = [each for each in EXAMPLES if each.stem == values]
        (head,) = [pod for pod in pods(render(path)) if pod.name.endswith("/head")]
        assert head.spec.get("automountServiceAccountToken", True) == asks


def test_chart_cluster_roles_allow_nodes_to_read_nodes_only(manifests):
    for role in of_kind(manifests, "ClusterRole"):
        assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert not of_kind(manifests, "Role", "RoleBinding")


def test_chart_exposes_the_service_through_ingress_only(manifests):
    assert {each["spec"]["type"] for each in of_kind(manifests, "Service") if "type" in each["spec"]} == {"ClusterIP"}
    for ingress in of_kind(manifests, "Ingress"):
        (rule,) = ingress["spec"]["rules"]
        assert [entry["hosts"] for entry in ingress["spec"]["tls"]] == [[rule["host"]]]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": "manta", "port": {"name": "http"}}
        assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/affinity"] == "cookie"


def test_chart_secret_values_appear_in_secrets_only(manifests):
    values = {
        base64.b64decode(value).decode() for each in of_kind(manifests, "Secret") for value in each["data"].values()
    }
    assert values and all(len(value) >= 40 for value in values)
    others = json.dumps([each for each in manifests if each["kind"] != "Secret"])
    assert not [value for value in values if value in others]
    for pod in pods(manifests):
        for container in pod.containers:
            for variable in container.get("env", []):
                assert ("secretKeyRef" in variable.get("valueFrom", {})) == (variable["name"] in HIDDEN), variable[
                    "name"
                ]


def test_chart_generated_secrets_outlive_the_release(manifests):
    for each in of_kind(manifests, "Secret", "PersistentVolumeClaim"):
        assert each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_chart_containers_get_only_the_secrets_they_need(manifests):
    got = {name: HIDDEN & each.environment.keys() for name, each in containers(manifests, secrets=GIVEN).items()}
    bucket = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} if "manta-bucket" in json.dumps(manifests) else set()
    assert got.pop("manta-migrate") == {"MANTA_DATABASE_URL"}
    for key in ("admin", "prometheus"):
        assert got.pop(f"manta-{key}-key") == {"MANTA_DATABASE_URL", "MANTA_API_KEY"}
    assert got.pop("manta") == {"MANTA_DATABASE_URL", "RAY_AUTH_TOKEN"} | bucket
    kept = {"REDIS_PASSWORD"} if "manta-redis" in json.dumps(manifests) else set()
    assert got.pop("manta-head-svc") == {"RAY_AUTH_TOKEN"} | kept
    assert got.pop("manta-postgresql", {"POSTGRES_PASSWORD"}) == {"POSTGRES_PASSWORD"}
    assert got and all(secrets == {"RAY_AUTH_TOKEN"} | bucket for secrets in got.values()), "no key where jobs run"


def test_chart_generated_keys_have_the_scopes_their_holders_need(manifests):
    made = containers(manifests, secrets=GIVEN)
    for name, scope in (("admin", "admin"), ("prometheus", "read")):
        assert made[f"manta-{name}-key"].command == ("manta", "keys", "add", name, "--scope", scope)


def test_chart_environment_variables_are_all_read_by_a_program(manifests, settings_known):
    assert len(settings_known) > 20
    for name, each in containers(manifests, secrets=GIVEN).items():
        unknown = each.environment.keys() - settings_known - OTHERS
        if each.command[:1] == ("ray",):
            unknown -= {"POD_IP", "REDIS_PASSWORD"}  # said in the command
        assert not unknown, name
    for pod in pods(manifests):
        assert pod.spec["enableServiceLinks"] is False, "or Kubernetes adds MANTA_PORT for a Service called manta"


def test_chart_settings_are_accepted_by_the_service(manifests):
    plane = containers(manifests, secrets=GIVEN)["manta"]
    settings = Settings.from_environment(plane.environment)
    assert {"--tls-terminated", "--tls-cert=/etc/manta/tls/tls.crt"} & set(plane.command)
    assert settings.database_url and str(settings.checkpoints) and settings.allowed_hosts[0] == "manta"


def test_chart_data_roots_are_the_mounted_volumes():
    mounts = [
        f"data[{n}].{key}={value}" for n in (0, 1) for key, value in (("claim", f"c{n}"), ("mountPath", f"/data/{n}"))
    ]
    made = containers(render(EXAMPLES[0], *mounts), secrets=GIVEN)
    assert Settings.from_environment(made["manta"].environment).data_roots == (Path("/data/0"), Path("/data/1"))


def test_chart_commands_are_accepted_by_their_programs(manifests):
    started = [each.command for each in containers(manifests, secrets=GIVEN).values() if each.command]
    before_the_end = [
        container["lifecycle"]["preStop"]["exec"]["command"]
        for pod in pods(manifests)
        for container in pod.spec["containers"]
        if "lifecycle" in container
    ]
    assert before_the_end
    for command in (*started, *before_the_end):
        assert not [word for word in command if "$(" in word], "the kubelet has put something in its place"
        assert command[0] in ("manta", "ray")
        check_command(command)


def test_chart_containers_of_the_tests_match_the_kubelets_view():
    (path,) = [each for each in EXAMPLES if each.stem == "one-node"]
    by_name = containers(render(path), {"manta-cpu": "10.1.2.3"})
    worker = by_name["manta-cpu"]
    assert {"--node-ip-address=10.1.2.3", "--address=manta-head-svc:6379"} <= set(worker.command)
    assert (worker.address, worker.user, worker.group) == ("10.1.2.3", 10001, 10001)
    assert worker.environment["MANTA_NODE_NAME"] == "machine-of-manta-cpu"
    assert (worker.shared_memory, worker.read_only, worker.capabilities) == (2**30, True, False)
    assert ("manta-checkpoints", "/checkpoints") in {(each.source, each.target) for each in worker.mounts}
    assert worker.health == ("bash", "-c", "</dev/tcp/127.0.0.1/6380")
    password = by_name["manta-postgresql"].environment["POSTGRES_PASSWORD"]
    url = f"postgresql://manta:{password}@manta-postgresql:5432/manta"
    assert by_name["manta"].environment["MANTA_DATABASE_URL"] == url
    first = ["manta-migrate", "manta-admin-key", "manta-prometheus-key"]
    assert [name for name, each in by_name.items() if each.once] == first == [*by_name["manta"].needs]
