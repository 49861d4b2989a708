"""The Helm chart as `helm template` renders it, and what Kubernetes would start from that: command, environment and
user of each container, so that they can be checked, or started as ordinary processes."""

from __future__ import annotations

import base64
import copy
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.records import Container, Mount, WayIn

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "manta"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
API_VERSIONS = ("ray.io/v1", "monitoring.coreos.com/v1")
"""What the cluster has beside Kubernetes' own, as the examples need it."""
NAMESPACE = "training"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod that something rendered has Kubernetes make."""

    name: str
    """What makes it, such as `Deployment/manta`, with the group of a RayCluster."""
    labels: Mapping[str, str]
    spec: Manifest

    @property
    def containers(self) -> list[Manifest]:
        """All of them; those that start the pod first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def helm() -> str:
    """The program; skips the test where there is none."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("there is no helm on the PATH")
    return program


def run_helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`helm` with these words, to its end."""
    return subprocess.run([helm(), *map(str, words)], capture_output=True, text=True, check=False, timeout=60)


@cache
def render(
    values: Path | None = None,
    *settings: str,
    chart: Path = CHART,
    api_versions: tuple[str, ...] = API_VERSIONS,
) -> list[Manifest]:
    """The manifests of a release `manta`, which are rendered once, so nobody changes them; `settings`: as `--set` takes
    them. Fails the test where helm does."""
    done = render_or_refuse(values, *settings, chart=chart, api_versions=api_versions)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def render_or_refuse(
    values: Path | None = None,
    *settings: str,
    chart: Path = CHART,
    api_versions: Iterable[str] = API_VERSIONS,
) -> subprocess.CompletedProcess[str]:
    """The same, as helm says it."""
    options = [f"--values={values}"] if values is not None else []
    options += [f"--set={each}" for each in settings] + [f"--api-versions={each}" for each in api_versions]
    return run_helm("template", "manta", chart, f"--namespace={NAMESPACE}", *options)


def of_kind(manifests: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [each for each in manifests if each["kind"] in kinds]


def pods(manifests: Iterable[Manifest]) -> Iterator[Pod]:
    """The pods that Kubernetes or KubeRay makes of them."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            template = manifest["spec"]["template"]
            yield Pod(name, template["metadata"]["labels"], template["spec"])
        elif manifest["kind"] == "RayCluster":
            groups = {"head": manifest["spec"]["headGroupSpec"]}
            groups |= {group["groupName"]: group for group in manifest["spec"]["workerGroupSpecs"]}
            for group, spec in groups.items():
                template = copy.deepcopy(spec["template"])
                if group == "head":
                    template["spec"]["containers"][0]["env"] += _added_by_kuberay(manifest["spec"])
                by_kuberay = {"ray.io/cluster": manifest["metadata"]["name"]}
                yield Pod(f"{name}/{group}", {**template["metadata"]["labels"], **by_kuberay}, template["spec"])


def _added_by_kuberay(cluster: Manifest) -> list[Manifest]:
    """Variables of a head whose state is kept in Redis."""
    options = cluster.get("gcsFaultToleranceOptions", {})
    address = [{"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]}] if options else []
    return address + ([{"name": "REDIS_PASSWORD", **options["redisPassword"]}] if "redisPassword" in options else [])


def containers(
    manifests: Sequence[Manifest],
    addresses: Mapping[str, str] | None = None,
    secrets: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Container]:
    """What the pods' containers start, one pod of each kind, by name: of a pod behind a Service the Service's, such as
    `manta-head-svc`; of a group of nodes `manta-GROUP`; of those that start a pod the pod's with their own behind it.
    `addresses`: of pods, by name; `secrets`: those that are not rendered, by name and key. Volumes from Secrets are
    left out."""
    known = {**{name: dict(values) for name, values in (secrets or {}).items()}, **_rendered_secrets(manifests)}
    by_name = {}
    hosts = {_host(pod, manifests): pod for pod in pods(manifests)}
    for name, pod in hosts.items():
        before, ways_in = dict[str, str](), _ways_in(pod, hosts, manifests)
        address = (addresses or {}).get(name)
        facts = {"status.podIP": address or "10.0.0.1", "spec.nodeName": f"machine-of-{name}"}
        for container in pod.containers:
            starts_pod = container not in pod.spec["containers"]
            record = _container(pod, container, facts, known)
            own = f"{name}-{container['name']}" if starts_pod else name
            at = None if starts_pod else address
            by_name[own] = replace(record, name=own, address=at, once=starts_pod, needs=dict(before), ways_in=ways_in)
            before[own] = "completed"
    return by_name


def _host(pod: Pod, manifests: Iterable[Manifest]) -> str:
    kind, name, *group = pod.name.split("/")
    if kind == "RayCluster":
        return f"{name}-head-svc" if group == ["head"] else f"{name}-{group[0]}"
    (service,) = [
        each for each in of_kind(manifests, "Service") if each["spec"]["selector"].items() <= pod.labels.items()
    ]
    return str(service["metadata"]["name"])


def _ways_in(pod: Pod, hosts: Mapping[str, Pod], manifests: Iterable[Manifest]) -> tuple[WayIn, ...] | None:
    """What the NetworkPolicies that select the pod let in from other pods of the chart; None where none selects it."""
    policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy") if _selects(each["spec"], pod)]
    ways = []
    for rule in (rule for policy in policies for rule in policy["ingress"]):
        ports = tuple((each["port"], each.get("endPort", each["port"])) for each in rule.get("ports", []))
        sources = [peer for peer in rule["from"] if "podSelector" in peer and "namespaceSelector" not in peer]
        for name, other in hosts.items():
            if any(_selects(peer, other) for peer in sources):
                starting = [f"{name}-{each['name']}" for each in other.spec.get("initContainers", [])]
                ways += [WayIn(each, ports) for each in (name, *starting)]
    return tuple(ways) if policies else None


def _selects(policy: Manifest, pod: Pod) -> bool:
    return bool(policy["podSelector"]["matchLabels"].items() <= pod.labels.items())


def _container(
    pod: Pod, container: Manifest, facts: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]
) -> Container:
    environment = dict[str, str]()
    for source in container.get("envFrom", []):
        environment |= secrets[source["secretRef"]["name"]]
    environment |= {each["name"]: _value(each, facts, secrets) for each in container.get("env", [])}
    rights = {**pod.spec["securityContext"], **container["securityContext"]}
    words = [*container.get("command", []), *container.get("args", [])]
    places = {mount["name"]: mount for mount in container.get("volumeMounts", [])}
    owner = f"uid={rights['runAsUser']},gid={rights['fsGroup']},mode=0700,exec"
    mounts, temporary, shared_memory = [], {}, 64 * 2**20
    for volume in (each for each in pod.spec["volumes"] if each["name"] in places):
        place = places[volume["name"]]
        if place["mountPath"] == "/dev/shm":
            shared_memory = in_bytes(volume["emptyDir"]["sizeLimit"])
        elif "emptyDir" in volume:
            temporary[place["mountPath"]] = owner
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            mounts.append(Mount(claim, place["mountPath"], place.get("readOnly", False)))
    for name in places.keys() - {each["name"] for each in pod.spec["volumes"]}:  # a StatefulSet's own claims
        mounts.append(Mount(f"{pod.name.replace('/', '-')}-{name}", places[name]["mountPath"]))
    return Container(
        name=container["name"],
        image=container["image"],
        command=tuple(_expanded(word, environment) for word in words),
        environment=environment,
        user=rights["runAsUser"],
        group=rights["runAsGroup"],
        networks=frozenset({"pods"}),
        mounts=tuple(mounts),
        temporary=temporary,
        shared_memory=shared_memory,
        read_only=rights["readOnlyRootFilesystem"],
        capabilities=rights["capabilities"]["drop"] != ["ALL"],
        new_privileges=rights["allowPrivilegeEscalation"],
        health=_health(container),
        before_stop=tuple(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])),
        limits={
            "cpus": str(container["resources"]["limits"]["cpu"]),
            "memory": container["resources"]["limits"]["memory"],
        },
    )


def _health(container: Manifest) -> tuple[str, ...] | None:
    """A command that asks what the readiness probe asks."""
    probe = container.get("readinessProbe")
    if probe is None:
        return None
    if "exec" in probe:
        return tuple(probe["exec"]["command"])
    if "tcpSocket" in probe:
        return ("bash", "-c", f"</dev/tcp/127.0.0.1/{probe['tcpSocket']['port']}")
    asked = probe["httpGet"]
    (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == asked["port"]]
    return ("wget", "-q", "-O", "/dev/null", f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}")


def in_bytes(quantity: str) -> int:
    """A quantity such as 8Gi in bytes."""
    return int(quantity[:-2]) * 1024 ** ("KiMiGiTi".index(quantity[-2:]) // 2 + 1)


def _rendered_secrets(manifests: Iterable[Manifest]) -> dict[str, dict[str, str]]:
    return {
        each["metadata"]["name"]: {key: base64.b64decode(value).decode() for key, value in each["data"].items()}
        for each in of_kind(manifests, "Secret")
    }


def _value(variable: Manifest, facts: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return facts[source["fieldRef"]["fieldPath"]]
    return secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """As the kubelet does: a name that is not known stays as it is."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: environment.get(match[1], match[0]), word)
