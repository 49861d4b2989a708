"""Who is asked whether a machine is to be taken away: the value of `MANTA_NODE_NOTICES` as objects. Clouds are in
`cloud_notices.py`.

Kubernetes says it by taints and conditions of the node that the pod runs on. The pod reads its own Node object with its
service account, which must be permitted to do so. A tool that drains a node taints it first and evicts its pods soon
after; Kubernetes then gives them a grace period, 30 s by default. A cordon alone (`node.kubernetes.io/unschedulable`)
ends nothing by itself: jobs leave such a node if there is room elsewhere.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from manta.workers.errors import MantaError
from manta.workers.node.cloud_notices import CLOUDS, SERVICES, MetadataSource
from manta.workers.node.notices import NOTICE_SECONDS, Notice, NoticeSource, SourceUnavailable, most_urgent
from manta.workers.settings import Pod, read_pod, read_slurm_job_end

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the token of a pod's service account and the certificate of the API's authority."""
ANSWER_SECONDS = 2.0
TAINTS: dict[str, float | None] = {
    "node.kubernetes.io/unschedulable": None,
    "node.kubernetes.io/out-of-service": NOTICE_SECONDS,
    "ToBeDeletedByClusterAutoscaler": NOTICE_SECONDS,
    "karpenter.sh/disrupted": NOTICE_SECONDS,
    "karpenter.sh/disruption": NOTICE_SECONDS,
    "cloud.google.com/impending-node-termination": NOTICE_SECONDS,
    "aws-node-termination-handler/spot-itn": NOTICE_SECONDS,
    "aws-node-termination-handler/asg-lifecycle-termination": NOTICE_SECONDS,
    "aws-node-termination-handler/scheduled-maintenance": None,
    "aws-node-termination-handler/rebalance-recommendation": None,
    "remediator.aks.microsoft.com/unschedulable": NOTICE_SECONDS,
    "remediator.kubernetes.azure.com/unschedulable": NOTICE_SECONDS,
}
"""By key of a taint, how many seconds the node can still be relied on; None if the taint does not say."""
CONDITIONS = ("PreemptScheduled", "TerminateScheduled", "RedeployScheduled", "RebootScheduled")
"""Conditions that AKS sets for Azure's scheduled events that end a machine."""
_MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class KubernetesSource:
    """The API of the cluster in which this process is a pod."""

    further_taints: Mapping[str, float | None] = field(default_factory=dict)
    """Additions to `TAINTS`."""
    service_account: Path = SERVICE_ACCOUNT
    name: str = "kubernetes"

    @classmethod
    def of(cls, text: str) -> KubernetesSource:
        """From the keys of further taints, separated by `+`, each optionally followed by a colon and the seconds that
        it leaves. Raises ValueError."""
        further: dict[str, float | None] = {}
        for each in filter(None, text.split("+")):
            key, _, seconds = each.partition(":")
            further[key] = float(seconds) if seconds else None
            if not key or not 0 <= (further[key] or 0.0) < float("inf"):
                raise ValueError(each)
        return cls(further)

    def notice(self, now: datetime) -> Notice | None:
        """The notice in the node's taints and conditions; None if there is none. Raises SourceUnavailable."""
        pod = read_pod()
        if pod is None:
            raise SourceUnavailable(
                "the pod does not know the Kubernetes API or its node: MANTA_NODE_NAME must be its spec.nodeName "
                "(downward API), and its service account's token must be mounted"
            )
        document = self._node(pod)
        try:
            return node_notice(document, {**TAINTS, **self.further_taints})
        except (TypeError, KeyError, AttributeError) as error:
            raise SourceUnavailable(f"the Kubernetes API gave an unknown answer about node {pod.node}") from error

    def _node(self, pod: Pod) -> Any:
        """The Node object from the API server's cache, so that it need not look it up for each of many requests."""
        path = f"/api/v1/nodes/{quote(pod.node, safe='')}?resourceVersion=0"
        where = f"the Kubernetes API at {pod.api_host}:{pod.api_port}"
        connection = None
        try:
            token = (self.service_account / "token").read_text().strip()  # read each time: it is renewed
            trusted = ssl.create_default_context(cafile=str(self.service_account / "ca.crt"))
            connection = http.client.HTTPSConnection(
                pod.api_host, pod.api_port, timeout=ANSWER_SECONDS, context=trusted
            )
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": "application/json"})
            response = connection.getresponse()
            content = response.read(_MAX_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceUnavailable(f"{where} does not answer: {error}") from error
        finally:
            if connection is not None:
                connection.close()
        if response.status in (401, 403):
            raise SourceUnavailable(
                f"{where} does not let the pod read node {pod.node} ({response.status}): bind its service account to a "
                "ClusterRole that may `get` `nodes`"
            )
        if response.status == 404:
            raise SourceUnavailable(
                f"{where} knows no node {pod.node}: MANTA_NODE_NAME must be the pod's spec.nodeName"
            )
        if response.status != 200:
            raise SourceUnavailable(f"{where} answers with {response.status}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise SourceUnavailable(f"{where} answers with what is no JSON") from error


def node_notice(document: Any, taints: Mapping[str, float | None]) -> Notice | None:
    """The most urgent notice in a Node object, where `taints` are those that end a node; None if there is none."""
    notices = []
    for taint in document["spec"].get("taints") or ():
        key = taint["key"]
        if key in taints:
            notices.append(Notice(f"taint {key}", taints[key], f"Kubernetes has tainted the node with {key}"))
    for condition in (document.get("status") or {}).get("conditions") or ():
        kind = condition["type"]
        if kind in CONDITIONS and condition["status"] == "True":
            reason = f"Kubernetes says {kind} of the node"
            notices.append(Notice(f"condition {kind}", NOTICE_SECONDS, reason))
    if document["metadata"].get("deletionTimestamp"):
        notices.append(Notice("deletion", NOTICE_SECONDS, "the node is being deleted from Kubernetes"))
    return most_urgent(notices)


LEAD_SECONDS = 600.0
"""The end is announced when it is this near."""


@dataclass(frozen=True)
class SlurmSource:
    """The Slurm job in which Ray was started. Slurm tells all its processes when it begins how long it may last.

    Slurm also sends a signal, before the end if `--signal` requests it, and at the end: it reaches Ray's processes too,
    which end at once.
    """

    lead_seconds: float = LEAD_SECONDS
    """How long before its end the node is to be drained."""
    name: str = "slurm"

    @classmethod
    def of(cls, text: str) -> SlurmSource:
        """From the seconds, or the default if `text` is empty. Raises ValueError."""
        seconds = float(text) if text else LEAD_SECONDS
        if not 0 <= seconds < float("inf"):
            raise ValueError(text)
        return cls(seconds)

    def notice(self, now: datetime) -> Notice | None:
        """A notice if the job reaches its time limit soon, otherwise None. Raises SourceUnavailable."""
        end = read_slurm_job_end()
        if end is None:
            raise SourceUnavailable("SLURM_JOB_END_TIME is not set: Ray was not started in a Slurm job on this machine")
        left = end - now.astimezone(UTC).timestamp()
        if left > self.lead_seconds:
            return None
        return Notice(f"end {end:.0f}", max(0.0, left), "the Slurm job reaches its time limit")


class UnknownSource(MantaError):
    """The text contains an unknown source of notices."""


def notice_sources(text: str) -> list[NoticeSource]:
    """The sources that `text` names, separated by commas; none is asked yet. Raises UnknownSource."""
    return [_source(each.strip()) for each in text.split(",")]


def _source(text: str) -> NoticeSource:
    name, _, about = text.partition("=")
    try:
        if name in CLOUDS and (not about or urlsplit(about).scheme == "http"):
            return MetadataSource(name, about or SERVICES[name])
        if name == "kubernetes":
            return KubernetesSource.of(about)
        if name == "slurm":
            return SlurmSource.of(about)
    except ValueError as error:
        raise UnknownSource(_problem(text)) from error
    raise UnknownSource(_problem(text))


def _problem(text: str) -> str:
    return (
        f"{text!r} is not a known source of notices: use {', '.join(CLOUDS)}, CLOUD=http://HOST:PORT, kubernetes, "
        "kubernetes=TAINT+TAINT:SECONDS, slurm or slurm=SECONDS, several with commas"
    )
