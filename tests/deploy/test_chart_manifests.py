"""What the Helm chart renders for its examples: it is what Kubernetes and KubeRay take, and it fits together."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.version import Version

from manta.api.routes import health
from manta.service.cluster.node_shapes import shapes_in
from manta.service.cluster.placement import UNITS
from manta.service.settings import DEFAULT_PORT
from manta.workers.system.sockets import PortRange
from tests.deploy.chart import CHART, EXAMPLES, ROOT, of_kind, pods, render, render_or_refuse, run_helm
from tests.e2e.cluster_apart import RAY_PORT, RAY_SERVER_PORTS, RAY_WORKER_PORTS

RELEASES = ("1.29", kubernetes_validate.latest_version())
"""Of Kubernetes, whose schemas the manifests are held against."""
CUSTOM = ("RayCluster", "ServiceMonitor", "PrometheusRule")
SCHEMA = json.loads((Path(__file__).parent / "raycluster.schema.json").read_text(encoding="utf-8"))
PATHS = {route.path for route in health.router.routes}
RAY_PORTS = {"port": str(RAY_PORT), **{name: str(port) for name, port in RAY_SERVER_PORTS.items()}}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def manifests(request):
    """What an example renders."""
    return render(request.param)


def labelled(labels, selector):
    return selector and selector.items() <= labels.items()


def test_chart_examples_are_those_the_documentation_names():
    assert [path.stem for path in EXAMPLES] == ["gpu-pool", "one-node", "several-pools", "spot-pools"]


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_chart_passes_helm_lint(values):
    done = run_helm("lint", "--strict", "--quiet", CHART, *([f"--values={values}"] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr


def test_chart_version_equals_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert chart["version"] == chart["appVersion"] == as_semantic(package)


def as_semantic(version):
    parsed = Version(version)
    dev = f"-dev.{parsed.dev}" if parsed.is_devrelease else ""
    return parsed.base_version + dev


def test_chart_ray_version_equals_that_of_the_images():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["ray"]["version"] == pinned


@pytest.mark.parametrize("release", RELEASES)
def test_chart_manifests_are_valid_for_kubernetes(manifests, release):
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, release, strict=True)
    for pod in pods(manifests):
        metadata = {"name": "pod", "labels": dict(pod.labels)}
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}, release, True
        )


def test_chart_cluster_is_valid_for_kuberay(manifests):
    (cluster,) = of_kind(manifests, "RayCluster")
    jsonschema.validate(cluster, SCHEMA)
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys(), (
            "KubeRay finds pods by them"
        )


def test_documented_cluster_of_others_is_valid_and_as_the_chart_makes_its_own():
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(encoding="utf-8")
    cluster = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    jsonschema.validate(cluster, SCHEMA)
    ours = render(CHART / "examples" / "gpu-pool.yaml", "image.registry=REGISTRY")
    images = {each["image"] for pod in pods(ours) for each in pod.containers}
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, RELEASES[-1], True)
        assert {each["image"] for each in pod["spec"]["containers"]} <= images
    assert cluster["spec"]["rayVersion"] == of_kind(ours, "RayCluster")[0]["spec"]["rayVersion"]


def test_chart_worker_groups_give_the_ray_autoscaler_their_resources(manifests):
    from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec

    (cluster,) = of_kind(manifests, "RayCluster")
    types = _generate_available_node_types_from_ray_cr_spec(cluster["spec"])
    assert (types.pop("headgroup")["resources"]["CPU"], len(types)) == (0, len(cluster["spec"]["workerGroupSpecs"]))
    for group in cluster["spec"]["workerGroupSpecs"]:
        read, (unit, places) = types[group["groupName"]], places_of(group)
        assert {each: count for each, count in read["resources"].items() if each in UNITS and count} == {unit: places}
        assert read["min_workers"] <= group["replicas"] <= read["max_workers"]


def test_chart_tells_control_planes_the_node_shapes_of_the_autoscaler(manifests):
    (cluster,) = of_kind(manifests, "RayCluster")
    (plane,) = [pod for pod in pods(manifests) if pod.name.startswith("Deployment/")]
    said = {each["name"]: each.get("value") for each in plane.spec["containers"][0]["env"]}.get("MANTA_NODE_SHAPES")
    if not cluster["spec"].get("enableInTreeAutoscaling"):
        assert said is None
        return
    assert {(shape.type, shape.max_nodes, shape.unit, shape.units) for shape in shapes_in(said)} == {
        (group["groupName"], group["maxReplicas"], *places_of(group)) for group in cluster["spec"]["workerGroupSpecs"]
    }


def places_of(group):
    """What ranks take on a node of a group, and how many of it there are."""
    container = group["template"]["spec"]["containers"][0]
    if gpus := container["resources"]["limits"].get("nvidia.com/gpu", 0):
        return "GPU", gpus
    (given,) = [word for word in container["command"] if word.startswith("--resources=")]
    return "manta_slot", json.loads(given.partition("=")[2])["manta_slot"]


def test_chart_start_command_matches_the_kuberay_parameters(manifests):
    (cluster,) = of_kind(manifests, "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        command = group["template"]["spec"]["containers"][0]["command"]
        given = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
        assert given.pop("node-ip-address") == "$(POD_IP)"
        assert given.pop("redis-password", None) in (None, "$(REDIS_PASSWORD)"), "KubeRay refuses it in rayStartParams"
        parameters = dict(group["rayStartParams"])
        if "resources" in parameters:
            parameters["resources"] = json.loads(parameters["resources"])
        assert given == parameters
        assert ("--head" in command) == (group is groups[0])


def test_chart_selectors_match_the_pods_they_are_for(manifests):
    labels = [pod.labels for pod in pods(manifests)]
    for each in of_kind(manifests, "Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        assert sum(labelled(pod, selector) for pod in labels) == 1, f"{each['kind']} {each['metadata']['name']}"
    for policy in of_kind(manifests, "NetworkPolicy"):
        rules = policy["spec"]["ingress"]
        own = [peer["podSelector"] for rule in rules for peer in rule["from"] if set(peer) == {"podSelector"}]
        for selector in (policy["spec"]["podSelector"], *own):
            assert any(labelled(pod, selector["matchLabels"]) for pod in labels), policy["metadata"]["name"]
    for monitor in of_kind(manifests, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [each for each in of_kind(manifests, "Service") if labelled(each["metadata"]["labels"], wanted)]
        (service,) = services
        (port,) = service["spec"]["ports"]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics") and "/metrics" in PATHS
        # What rules and dashboards take for granted: up{job="manta"}, and ids of training jobs in our own label.
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "manta" and endpoint["honorLabels"]


def test_chart_pods_are_all_covered_by_network_policies(manifests):
    policies = of_kind(manifests, "NetworkPolicy")
    for pod in pods(manifests):
        covering = [each for each in policies if labelled(pod.labels, each["spec"]["podSelector"]["matchLabels"])]
        assert covering, pod.name
        for policy in covering:
            assert policy["spec"]["policyTypes"] == ["Ingress"]
            for rule in policy["spec"]["ingress"]:
                assert rule["from"], "an empty list lets everybody in"
                from_elsewhere = [peer for peer in rule["from"] if "podSelector" not in peer]
                reached = {port["port"] for port in rule.get("ports", [])}
                assert not from_elsewhere or reached in ({DEFAULT_PORT}, {RAY_SERVER_PORTS["metrics-export-port"]})


def test_chart_ports_match_the_code_and_the_documentation(manifests):
    (cluster,) = of_kind(manifests, "RayCluster")
    first, last = RAY_WORKER_PORTS.split("-")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        parameters = group["rayStartParams"]
        expected = {**RAY_PORTS, "min-worker-port": first, "max-worker-port": last}
        assert {name: parameters[name] for name in expected if name in parameters} == {
            n: p for n, p in expected.items() if n in parameters
        }
        assert set(expected) - set(parameters) <= {"port"}
    (plane,) = [pod for pod in pods(manifests) if pod.name.startswith("Deployment/")]
    (container,) = plane.spec["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == DEFAULT_PORT and f"--port={DEFAULT_PORT}" in container["command"]
    assert f"--ray={cluster['metadata']['name']}-head-svc:{RAY_PORT}" in container["command"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    ours = PortRange.of(environment["MANTA_PORTS"])
    open_to_nodes = [
        rule["ports"] for rule in policy(manifests, "manta")["spec"]["ingress"] if rule["ports"][0].get("endPort")
    ]
    assert open_to_nodes == [[{"protocol": "TCP", "port": ours.first, "endPort": ours.last}]]
    open_to_planes = [
        (each["port"], each["endPort"])
        for rule in policy(manifests, "manta-nodes")["spec"]["ingress"]
        for each in rule.get("ports", [])
        if "endPort" in each
    ]
    assert open_to_planes == [(6379, 6384), (int(first), int(last)), (ours.first, ours.last)]
    assert {int(port) for port in RAY_PORTS.values()} == set(range(6379, 6385))


def policy(manifests, name):
    (manifest,) = [each for each in of_kind(manifests, "NetworkPolicy") if each["metadata"]["name"] == name]
    return manifest


def test_chart_containers_are_probed_at_endpoints_they_serve(manifests):
    for pod in pods(manifests):
        for container in pod.spec["containers"]:
            known = {port["name"]: port["containerPort"] for port in container["ports"]}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container[kind]
                if "httpGet" in probe:
                    assert probe["httpGet"]["path"] in PATHS and known[probe["httpGet"]["port"]] == DEFAULT_PORT
                elif "tcpSocket" in probe:
                    option = "port" if "--head" in container["command"] else "node-manager-port"
                    assert f"--{option}={probe['tcpSocket']['port']}" in container["command"]
                else:
                    assert probe["exec"]["command"][0] == "pg_isready"


def test_chart_readiness_of_a_control_plane_does_not_depend_on_ray(manifests):
    """/readyz is 503 while Ray or the database is away, and then no pod would get any request."""
    (pod,) = [each for each in pods(manifests) if each.name.startswith("Deployment/")]
    (container,) = pod.spec["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_chart_containers_have_requests_and_limits(manifests):
    for pod in pods(manifests):
        for container in pod.containers:
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][kind].keys(), (
                    f"{pod.name}/{container['name']} {kind}"
                )
    for options in (each["spec"].get("autoscalerOptions") for each in of_kind(manifests, "RayCluster")):
        assert options is None or {"requests", "limits"} == options["resources"].keys()


def test_chart_shared_memory_is_in_memory_and_holds_the_snapshots():
    (group,) = [pod for pod in pods(render(CHART / "examples" / "gpu-pool.yaml")) if pod.name.endswith("/h100")]
    (volume,) = [each for each in group.spec["volumes"] if each["name"] == "shared-memory"]
    (mount,) = [each for each in group.spec["containers"][0]["volumeMounts"] if each["name"] == "shared-memory"]
    assert (volume["emptyDir"]["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")
    mebibytes = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
    needed = 28 * 875_000_000 * 8 + 80_000_000  # docs/deploy/ray.md, of eight ranks; Ray's object store
    assert needed <= mebibytes * 2**20 < needed + 256 * 2**20


def test_chart_pod_termination_leaves_time_to_drain(manifests):
    for pod in pods(manifests):
        for container in pod.spec["containers"]:
            if "lifecycle" in container:
                (deadline,) = [
                    int(word.removeprefix("--deadline="))
                    for word in container["lifecycle"]["preStop"]["exec"]["command"]
                    if word.startswith("--deadline=")
                ]
                assert pod.spec["terminationGracePeriodSeconds"] >= deadline + 30
    assert sum("lifecycle" in pod.spec["containers"][0] for pod in pods(manifests)) == sum(
        len(each["spec"]["workerGroupSpecs"]) for each in of_kind(manifests, "RayCluster")
    )


def test_chart_names_are_short_enough_for_kuberay():
    (cluster,) = of_kind(render(EXAMPLES[0], f"fullnameOverride={'a' * 40}"), "RayCluster")
    assert cluster["metadata"]["name"] == "a" * 40
    assert "fullnameOverride: String length" in render_or_refuse(EXAMPLES[0], f"fullnameOverride={'a' * 41}").stderr


def test_chart_dashboards_and_rules_are_copies_of_those_in_deploy():
    originals = {"rules.yml": ROOT / "deploy" / "prometheus" / "rules.yml"}
    originals |= {
        f"dashboards/{path.name}": path for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    }
    wanted = {name: path.read_bytes() for name, path in originals.items() if path.exists()}
    files = CHART / "files"
    there = {
        str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.suffix in (".yml", ".json")
    }
    assert there == wanted, "cp deploy/prometheus/rules.yml helm/manta/files/; the same with deploy/grafana/dashboards"
