"""What the Helm chart makes of values: those that do not fit are one sentence, secrets are made once and kept."""

from __future__ import annotations

import base64
import json
import shutil

import pytest
import yaml

from tests.deploy.chart import (
    API_VERSIONS,
    CHART,
    NAMESPACE,
    containers,
    of_kind,
    pods,
    render,
    render_or_refuse,
    run_helm,
)
from tests.deploy.kubernetes_server import kubernetes

ONE_NODE = CHART / "examples" / "one-node.yaml"
GROUP = "ray.workerGroups[0]"


def refused(*settings, values=ONE_NODE, api_versions=API_VERSIONS):
    done = render_or_refuse(values, *settings, api_versions=api_versions)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize(("settings", "sentence"), [
    (["checkpoints.claim.enabled=false"], "checkpoints need one place that all nodes reach"),
    (["checkpoints.url=s3://bucket/manta"], "checkpoints need one place that all nodes reach"),
    (["controlPlane.replicas=2"], "controlPlane.replicas above 1 needs ReadWriteMany in jobs.accessModes"),
    (["ingress.enabled=true", "ingress.host=there"], "ingress needs ingress.host and ingress.tlsSecret"),
    ([f"{GROUP}.gpus=8"], "worker group cpu needs either slots (CPU ranks a pod) or gpus"),
    ([f"{GROUP}.sharedMemory.size=6Gi"], "counts as memory of the pod, so resources.limits.memory (6144 MiB) must be"),
    ([f"{GROUP}.resources.limits.memory=1G"], "so resources.limits.memory (953 MiB) must be"),
    (["serviceAccount.name=a", "serviceAccount.annotations.b=c"], "give one of the two"),
    (["ray.autoscaling.enabled=true"], "worker group cpu needs maxReplicas, since ray.autoscaling is on"),
    (["controlPlane.replica=2"], "Additional property replica is not allowed"),
    (["controlPlane.settings.MANTA_API_KEY=secret"], "MANTA_API_KEY"),
    (["controlPlane.settings.MANTA_DATABASE_URL=secret"], "MANTA_DATABASE_URL"),
    (["controlPlane.settings.PATH=/bin"], "PATH"),
    (["checkpoints.url=gs://bucket"], "checkpoints.url: Does not match pattern"),
    ([f"{GROUP}.sharedMemory.size=lots"], "sharedMemory.size: Does not match pattern"),
    ([f"{GROUP}.sharedMemory.parametersPerRank=1"], "Must validate one and only one schema"),
    (["ray.ports=20000-x"], "ray.ports: Does not match pattern"),
    (["networkPolicy.clients[0].everybody=true"], "Additional property everybody is not allowed"),
    ([f"{GROUP}.resources.limits.memory=null"], "resources.limits.memory: Invalid type"),
])  # fmt: skip
def test_chart_refuses_invalid_values_with_valid_ones(settings, sentence):
    assert sentence in refused(*settings)


def test_chart_refuses_to_install_without_kuberay_or_the_prometheus_operator():
    assert "no RayCluster (ray.io/v1): install the KubeRay operator first" in refused(api_versions=())
    for kind in ("serviceMonitor", "prometheusRule"):
        said = refused(f"metrics.{kind}.enabled=true", api_versions=("ray.io/v1",))
        assert "need the Prometheus operator (monitoring.coreos.com/v1)" in said


def test_chart_uses_an_existing_ray_cluster_unchanged():
    manifests = render(ONE_NODE, "ray.address=there:6379", "ray.autoscaling.enabled=true", api_versions=())
    assert not of_kind(manifests, "RayCluster")
    (plane,) = [pod for pod in pods(manifests) if pod.name.startswith("Deployment/")]
    (container,) = plane.spec["containers"]
    assert "--ray=there:6379" in container["command"]
    assert "MANTA_NODE_SHAPES" not in {each["name"] for each in container["env"]}, "no nodes of ours come and go there"
    assert {each["metadata"]["name"] for each in of_kind(manifests, "NetworkPolicy")} == {"manta", "manta-postgresql"}


@pytest.mark.parametrize(
    ("settings", "strategy", "budgets"),
    [((), "Recreate", 0), (("controlPlane.replicas=2", "jobs.accessModes={ReadWriteMany}"), "RollingUpdate", 1)],
)
def test_chart_rolls_several_control_planes_one_at_a_time(settings, strategy, budgets):
    manifests = render(ONE_NODE, *settings)
    (deployment,) = of_kind(manifests, "Deployment")
    assert deployment["spec"]["strategy"]["type"] == strategy
    policies = of_kind(manifests, "PodDisruptionBudget")
    assert [each["spec"]["maxUnavailable"] for each in policies] == [1] * budgets
    assert all(each["spec"]["selector"] == deployment["spec"]["selector"] for each in policies)


def test_chart_spreads_control_planes_over_nodes_unless_an_affinity_is_given():
    def affinity(*settings):
        (deployment,) = of_kind(render(ONE_NODE, *settings), "Deployment")
        pod = deployment["spec"]["template"]
        return pod["spec"]["affinity"], pod["metadata"]["labels"]

    away, labels = affinity()
    (rule,) = away["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert rule["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert rule["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    own, _ = affinity("controlPlane.affinity.nodeAffinity.mine=yes")
    assert own == {"nodeAffinity": {"mine": "yes"}}


def test_chart_uses_existing_secrets_and_creates_none():
    settings = ["keys.existingSecret=k", "database.existingSecret=d", "database.key=dsn", "ray.tokenSecret=t"]
    manifests = render(ONE_NODE, *settings)
    assert not of_kind(manifests, "Secret", "StatefulSet")
    text = json.dumps(manifests)
    for name, key in (("k", "admin"), ("k", "prometheus"), ("d", "dsn"), ("t", "auth_token")):
        assert json.dumps({"name": name, "key": key}) in text


def test_chart_secret_variables_reach_the_service_only_and_override_none_of_its_own():
    secret = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=mine", "MANTA_HOME": "/elsewhere"}
    started = containers(render(ONE_NODE, "controlPlane.environmentSecret=headers"), secrets={"headers": secret})
    assert started["manta"].environment["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=mine"
    assert started["manta"].environment["MANTA_HOME"] == "/var/lib/manta"
    having = [name for name, each in started.items() if "OTEL_EXPORTER_OTLP_HEADERS" in each.environment]
    assert having == ["manta"]


def test_chart_rules_and_dashboards_are_rendered_from_its_files(tmp_path):
    chart = shutil.copytree(CHART, tmp_path / "manta")
    rule = {"alert": "Away", "expr": "up == 0", "annotations": {"summary": "{{ $labels.job }} is away"}}
    rules = {"groups": [{"name": "manta", "rules": [rule]}]}
    board = {"title": "One job", "panels": [{"title": "{{job}} `loss`"}]}
    (chart / "files" / "dashboards").mkdir(parents=True, exist_ok=True)
    (chart / "files" / "rules.yml").write_text(yaml.safe_dump(rules))
    (chart / "files" / "dashboards" / "one_job.json").write_text(json.dumps(board, indent=2))
    wanted = [f"metrics.{each}.enabled=true" for each in ("prometheusRule", "rulesConfigMap", "dashboards")]
    manifests = render(ONE_NODE, *wanted, chart=chart)
    assert of_kind(manifests, "PrometheusRule")[0]["spec"] == rules
    maps = {each["metadata"]["name"]: each for each in of_kind(manifests, "ConfigMap")}
    assert yaml.safe_load(maps["manta-rules"]["data"]["rules.yml"]) == rules
    assert json.loads(maps["manta-dashboard-one-job"]["data"]["one_job.json"]) == board
    assert maps["manta-dashboard-one-job"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def install(kinds, secrets):
    """A dry run of an installation, or upgrade, with a server that knows these kinds and has these secrets."""
    with kubernetes(kinds, NAMESPACE, secrets) as url:
        options = [f"--namespace={NAMESPACE}", "--dry-run=server", "--disable-openapi-validation"]
        return run_helm("install", "manta", CHART, *options, f"--values={ONE_NODE}", f"--kube-apiserver={url}")


def test_chart_install_keeps_existing_secrets_and_checks_the_api_versions():
    manifests = render(ONE_NODE)
    kinds = {(each["apiVersion"], each["kind"]) for each in manifests}
    known = {
        "manta-postgresql": {"password": "p" * 40, "url": "of an address that has changed since"},
        "manta-ray": {"auth_token": "t" * 64},
        "manta-keys": {"admin": "manta_kept"},
    }
    done = install(kinds, known)
    assert done.returncode == 0, done.stderr
    printed, notes = done.stdout.split("MANIFEST:\n")[1].split("\nNOTES:\n")
    made = {
        each["metadata"]["name"]: each["data"] for each in of_kind(filter(None, yaml.safe_load_all(printed)), "Secret")
    }
    assert plain(made["manta-ray"]) == {"auth_token": "t" * 64}
    url = f"postgresql://manta:{'p' * 40}@manta-postgresql:5432/manta"
    assert plain(made["manta-postgresql"]) == {"password": "p" * 40, "url": url}
    keys = plain(made["manta-keys"])
    assert keys["admin"] == "manta_kept" and keys["prometheus"].startswith("manta_"), "what was missing is made"
    assert "kubectl -n training get secret manta-keys" in notes and "bundled PostgreSQL" in notes
    assert "MANTA_API_KEY" in notes and keys["admin"] not in notes

    done = install({each for each in kinds if each[0] != "ray.io/v1"}, {})
    assert done.returncode != 0 and "install the KubeRay operator first" in done.stderr


def plain(data):
    return {key: base64.b64decode(value).decode() for key, value in data.items()}
