"""What Kubernetes says before a node is taken away: taints and conditions of the node that the pod runs on.

The pod reads its own Node object with its service account, which must be permitted to do so. A tool that drains a node
taints it first and evicts its pods soon after; Kubernetes then gives them a grace period, 30 s by default. A cordon
alone (`node.kubernetes.io/unschedulable`) ends nothing by itself: jobs leave such a node if there is room elsewhere.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from manta.workers.node.notices import NOTICE_SECONDS, Notice, SourceUnavailable, most_urgent
from manta.workers.settings import Pod, read_pod

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
