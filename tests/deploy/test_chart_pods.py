"""What pods of the Helm chart get of its values, and who reaches them."""

from __future__ import annotations

import pytest
import yaml

from manta.service.settings import Settings
from tests.deploy.chart import CHART, containers, of_kind, pods, render, run_helm
from tests.deploy.records import Mount

ONE_NODE, SEVERAL_POOLS, SPOT_POOLS = (
    CHART / "examples" / f"{name}.yaml" for name in ("one-node", "several-pools", "spot-pools")
)
SOMEWHERE = {
    "nodeSelector": {"pool": "mine"},
    "tolerations": [{"key": "mine", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"mine": "yes"}},
}
CLASSES = {"priorityClassName": "high", "runtimeClassName": "other"}
CHANGES = {
    "image": {"pullSecrets": ["registry", {"name": "other"}]},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "mine"}},
    "podLabels": {"azure.workload.identity/use": "true"},
    "database": {"bundled": SOMEWHERE},
    "controlPlane": {**SOMEWHERE, "allowedHosts": ["here"], "trustedProxies": ["10.0.0.0/8", "192.0.2.1"]},
    "data": [{"claim": "corpora", "mountPath": "/data"}],
    "ingress": {"enabled": True, "host": "there", "tlsSecret": "certificate"},
}
PLANES, NODES = ("manta", "manta-migrate", "manta-admin-key", "manta-prometheus-key"), ("manta-head-svc", "manta-cpu")


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The example for one node with CHANGES."""
    values = yaml.safe_load(ONE_NODE.read_text(encoding="utf-8")) | CHANGES
    values["ray"]["workerGroups"][0] |= SOMEWHERE | CLASSES
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return render(file)


def pod_of(manifests, end):
    (pod,) = [each for each in pods(manifests) if each.name.endswith(end)]
    return pod


def test_chart_pods_have_the_given_scheduling_and_image_pull_secrets(changed):
    ends = ("Deployment/manta", "/cpu", "/head", "-postgresql")
    plane, group, head, database = (pod_of(changed, end).spec for end in ends)
    assert {name: plane[name] for name in SOMEWHERE} == {name: database[name] for name in SOMEWHERE} == SOMEWHERE
    assert {name: group[name] for name in (*SOMEWHERE, *CLASSES)} == SOMEWHERE | CLASSES
    assert not head.keys() & (SOMEWHERE | CLASSES).keys()
    secrets = [{"name": "registry"}, {"name": "other"}]
    assert all(each["imagePullSecrets"] == secrets for each in (plane, group, head, database))


def test_chart_pods_with_checkpoints_have_the_service_account_and_labels_of_the_values(changed):
    (account,) = of_kind(changed, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "mine"}
    for end, has_it in (("Deployment/manta", True), ("/cpu", True), ("/head", False), ("-postgresql", False)):
        pod = pod_of(changed, end)
        assert (pod.spec.get("serviceAccountName") == account["metadata"]["name"]) == has_it
        assert ("azure.workload.identity/use" in pod.labels) == has_it
    named = render(SPOT_POOLS, "serviceAccount.name=mine")
    assert not of_kind(named, "ServiceAccount") and pod_of(named, "/spot").spec["serviceAccountName"] == "mine"
    assert [each["name"] for each in of_kind(named, "ClusterRoleBinding")[0]["subjects"]] == ["mine"]
    assert "serviceAccountName" not in pod_of(render(ONE_NODE), "/cpu").spec, "the namespace's default one"


def test_chart_service_accepts_its_own_host_names_and_the_given_proxies(changed):
    settings = Settings.from_environment(containers(changed)["manta"].environment)
    assert settings.allowed_hosts == ("manta", "manta.training", "manta.training.svc", "there", "here")
    assert settings.trusted_proxies == ("10.0.0.0/8", "192.0.2.1")


def test_chart_mounts_data_read_only_and_on_ray_nodes_only(changed):
    made = containers(changed)
    assert Mount("corpora", "/data", read_only=True) in made["manta-cpu"].mounts
    (claim,) = [each for each in pod_of(changed, "/cpu").spec["volumes"] if each["name"] == "data-0"]
    assert claim["persistentVolumeClaim"] == {"claimName": "corpora", "readOnly": True}
    plane = made["manta"]
    assert [each.target for each in plane.mounts] == [f"{plane.environment['MANTA_HOME']}/jobs", "/checkpoints"]
    assert plane.environment["MANTA_CHECKPOINTS"] == "/checkpoints"


def test_chart_uses_existing_volume_claims_and_creates_the_others():
    settings = ["jobs.existingClaim=mine", "checkpoints.claim.existingClaim=theirs"]
    manifests = render(ONE_NODE, *settings)
    assert not of_kind(manifests, "PersistentVolumeClaim")
    assert {each.source for each in containers(manifests)["manta"].mounts} == {"mine", "theirs"}
    made = of_kind(render(ONE_NODE, "jobs.storageClass=shared", "jobs.storage=7Gi"), "PersistentVolumeClaim")
    (jobs,) = [each["spec"] for each in made if each["metadata"]["name"] == "manta-jobs"]
    assert (jobs["storageClassName"], jobs["resources"]["requests"]["storage"]) == ("shared", "7Gi")


def test_chart_worker_group_has_autoscaler_bounds_or_a_fixed_size():
    def sizes(*settings):
        sizes = [f"ray.workerGroups[0].{name}={count}" for name, count in
                 (("replicas", 2), ("minReplicas", 1), ("maxReplicas", 4))]  # fmt: skip
        (cluster,) = of_kind(render(ONE_NODE, *sizes, *settings), "RayCluster")
        (group,) = cluster["spec"]["workerGroupSpecs"]
        return tuple(group[name] for name in ("minReplicas", "replicas", "maxReplicas"))

    assert sizes() == (2, 2, 2)
    assert sizes("ray.autoscaling.enabled=true") == (1, 2, 4)


def test_chart_gpu_groups_use_the_cuda_image():
    images = {
        group: pod_of(render(SEVERAL_POOLS), f"/{group}").spec["containers"][0]["image"].partition(":")[0]
        for group in ("cpu", "l4", "head")
    }
    assert images == {"cpu": "manta/worker-cpu", "l4": "manta/worker-cuda", "head": "manta/control"}


def test_chart_passes_redis_password_and_object_store_settings_on():
    manifests = render(SEVERAL_POOLS, "checkpoints.region=moon-1", "ray.head.redis.key=word")
    (cluster,) = of_kind(manifests, "RayCluster")
    password = cluster["spec"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert password == {"name": "manta-redis", "key": "word"}
    for end in ("Deployment/manta", "/h100", "/cpu"):
        given = {each["name"]: each.get("value") for each in pod_of(manifests, end).spec["containers"][0]["env"]}
        assert (given["AWS_ENDPOINT_URL_S3"], given["AWS_DEFAULT_REGION"]) == ("https://objects.example.com", "moon-1")


@pytest.mark.parametrize("own", [False, True])
def test_chart_configures_probes_ingress_and_metrics_for_whoever_terminates_tls(own):
    settings = [
        "ingress.enabled=true",
        "ingress.host=there",
        "ingress.tlsSecret=c",
        "metrics.serviceMonitor.enabled=true",
    ]
    manifests = render(ONE_NODE, *settings, f"controlPlane.tlsSecret={'mine' if own else ''}")
    (container,) = pod_of(manifests, "Deployment/manta").spec["containers"]
    probed = {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")}
    (ingress,), (monitor,) = of_kind(manifests, "Ingress"), of_kind(manifests, "ServiceMonitor")
    backend = ingress["metadata"]["annotations"].get("nginx.ingress.kubernetes.io/backend-protocol")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert ("--tls-terminated" in container["command"]) is not own
    assert (probed, backend, endpoint.get("scheme")) == (
        ({"HTTPS"}, "HTTPS", "https") if own else ({"HTTP"}, None, None)
    )
    assert endpoint["authorization"]["credentials"] == {"name": "manta-keys", "key": "prometheus"}, "it may only read"


def test_chart_nodes_that_ask_kubernetes_have_an_account_that_may():
    manifests = render(SPOT_POOLS)
    (account,), (role,), (binding,) = (
        of_kind(manifests, kind) for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    )
    name = account["metadata"]["name"]
    assert {pod_of(manifests, f"/{group}").spec["serviceAccountName"] for group in ("spot", "steady")} == {name}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "training"}]


def test_chart_network_policies_open_ports_only_to_their_users():
    made = containers(render(ONE_NODE))
    ours, database = ((20000, 20199),), ((5432, 5432),)
    of_ray = ((6379, 6384), (10002, 10999), *ours)

    def let_in(name):
        return {way.source: way.ports for way in made[name].ways_in}

    assert let_in("manta") == dict.fromkeys((*PLANES, *NODES), ours)
    for node in NODES:
        assert let_in(node) == dict.fromkeys(NODES, ()) | dict.fromkeys(PLANES, of_ray)
    assert let_in("manta-postgresql") == dict.fromkeys(PLANES, database)


def test_rest_is_open_to_clients_and_prometheus_and_metrics_of_nodes_to_that_alone():
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(render(SPOT_POOLS), "NetworkPolicy")}

    def from_elsewhere(name):
        rules = policies[name]["ingress"]
        return [(rule["from"], rule["ports"][0]["port"]) for rule in rules if "namespaceSelector" in rule["from"][0]]

    clients = {"namespaceSelector": {"matchLabels": {"team": "training"}}}
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert from_elsewhere("manta") == [([clients, prometheus], 8400)]
    assert from_elsewhere("manta-nodes") == [([prometheus], 6384)]


def test_chart_resource_name_cut_to_length_ends_in_no_hyphen():
    release = f"manta-{'a' * 33}-b"
    done = run_helm("template", release, CHART, "--api-versions=ray.io/v1", f"--values={ONE_NODE}")
    (deployment,) = of_kind(filter(None, yaml.safe_load_all(done.stdout)), "Deployment")
    assert deployment["metadata"]["name"] == release[:39]
