"""What Kubernetes says of the node that a pod is on, and what is made of it."""

from datetime import UTC, datetime

import pytest
from kubernetes_api import KubernetesApi, make_certificate

from manta.workers.node import notice_sources
from manta.workers.node.notice_sources import CONDITIONS, TAINTS, KubernetesSource, node_notice
from manta.workers.node.notices import NOTICE_SECONDS, Notice, SourceUnavailable

NOW = datetime(2026, 11, 24, 12, 0, 0, tzinfo=UTC)
SOON = NOTICE_SECONDS


@pytest.fixture
def api(tmp_path, monkeypatch):
    """That of the cluster; this process is a pod on node n1."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    made = KubernetesApi(folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.port))
    monkeypatch.setenv("MANTA_NODE_NAME", "n1")
    monkeypatch.setattr(notice_sources, "ANSWER_SECONDS", 30.0)  # however busy the machine is
    yield made
    made.close()


@pytest.fixture
def ask(api):
    return lambda **further: KubernetesSource(further, api.folder).notice(NOW)


def taint(key, effect="NoSchedule"):
    return {"key": key, "effect": effect}


def test_kubernetes_source_requests_only_its_own_node(api, ask):
    assert ask() is None
    assert api.asked == ["/api/v1/nodes/n1?resourceVersion=0"]


@pytest.mark.parametrize(("taints", "expected"), [
    ([], None),
    (["nvidia.com/gpu", "node.kubernetes.io/memory-pressure"], None),
    (["DeletionCandidateOfClusterAutoscaler"], None),
    (["node.kubernetes.io/unschedulable"], ("node.kubernetes.io/unschedulable", None)),
    (["node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler"], ("ToBeDeletedByClusterAutoscaler", SOON)),
    (["karpenter.sh/disrupted"], ("karpenter.sh/disrupted", SOON)),
    (["karpenter.sh/disruption"], ("karpenter.sh/disruption", SOON)),
    (["cloud.google.com/impending-node-termination"], ("cloud.google.com/impending-node-termination", SOON)),
    (["aws-node-termination-handler/spot-itn"], ("aws-node-termination-handler/spot-itn", SOON)),
    (["aws-node-termination-handler/rebalance-recommendation"],
     ("aws-node-termination-handler/rebalance-recommendation", None)),
    (["remediator.kubernetes.azure.com/unschedulable"], ("remediator.kubernetes.azure.com/unschedulable", SOON)),
])  # fmt: skip
def test_only_kubernetes_taints_that_end_a_node_give_a_notice(api, ask, taints, expected):
    api.taints = [taint(key) for key in taints]
    notice = ask()
    if expected is None:
        assert notice is None
    else:
        key, seconds = expected
        assert notice == Notice(f"taint {key}", seconds, f"Kubernetes has tainted the node with {key}")


def test_custom_kubernetes_taints_give_a_notice_with_their_configured_deadline(api, ask):
    api.taints = [taint("example.com/sold", "NoExecute"), taint("example.com/rented")]
    assert ask() is None
    assert ask(**{"example.com/rented": None}).id == "taint example.com/rented"
    assert ask(**{"example.com/rented": None, "example.com/sold": 90.0}).seconds == 90.0


@pytest.mark.parametrize(("kind", "status", "heeded"), [
    ("PreemptScheduled", "True", True), ("PreemptScheduled", "False", False), ("PreemptScheduled", "Unknown", False),
    ("TerminateScheduled", "True", True), ("FreezeScheduled", "True", False), ("VMEventScheduled", "True", False),
    ("Ready", "True", False),
])  # fmt: skip
def test_only_kubernetes_conditions_that_end_a_node_give_a_notice(api, ask, kind, status, heeded):
    api.conditions = [{"type": "Ready", "status": "True"}, {"type": kind, "status": status}]
    expected = Notice(f"condition {kind}", SOON, f"Kubernetes says {kind} of the node") if heeded else None
    assert ask() == expected


def test_node_with_a_deletion_timestamp_gets_a_deletion_notice(api, ask):
    api.metadata["deletionTimestamp"] = "2026-11-24T12:00:00Z"
    assert ask() == Notice("deletion", SOON, "the node is being deleted from Kubernetes")


def test_kubernetes_taints_and_conditions_are_read_from_the_node_document():
    for key, seconds in TAINTS.items():
        assert node_notice({"metadata": {}, "spec": {"taints": [taint(key)]}}, TAINTS).seconds == seconds
    for kind in CONDITIONS:
        document = {"metadata": {}, "spec": {}, "status": {"conditions": [{"type": kind, "status": "True"}]}}
        assert node_notice(document, TAINTS).id == f"condition {kind}"


@pytest.mark.parametrize("status", [401, 403])
def test_account_that_may_not_read_nodes_is_one_clear_sentence(api, ask, status):
    api.status = status
    with pytest.raises(SourceUnavailable) as refusal:
        ask()
    assert str(refusal.value) == (
        f"the Kubernetes API at 127.0.0.1:{api.port} does not let the pod read node n1 ({status}): bind its service "
        "account to a ClusterRole that may `get` `nodes`"
    )


def test_kubernetes_token_is_read_again_for_each_request(api, ask):
    """Kubernetes renews it."""
    api.token = "another token"
    with pytest.raises(SourceUnavailable, match="does not let the pod read node n1"):
        ask()
    (api.folder / "token").write_text("another token")
    assert ask() is None


def test_kubernetes_api_with_an_untrusted_certificate_receives_no_request(api, ask):
    make_certificate(api.folder)
    with pytest.raises(SourceUnavailable, match=r"does not answer: .*certificate verify failed"):
        ask()
    assert api.asked == []


@pytest.mark.parametrize(("status", "content", "sentence"), [
    (404, b"", r"knows no node n1: MANTA_NODE_NAME must be the pod's spec\.nodeName$"),
    (503, b"", r"answers with 503$"),
    (200, b"no JSON", r"answers with what is no JSON$"),
    (200, b"[]", r"gave an unknown answer about node n1$"),
    (200, b'{"metadata": {}, "spec": {"taints": [{}]}}', r"gave an unknown answer about node n1$"),
])  # fmt: skip
def test_unusable_kubernetes_answer_makes_the_notice_source_unavailable(api, ask, status, content, sentence):
    api.status, api.content = status, content
    with pytest.raises(SourceUnavailable, match=sentence):
        ask()


def test_unreachable_kubernetes_api_makes_the_notice_source_unavailable(api, ask):
    api.close()
    with pytest.raises(SourceUnavailable, match=r"^the Kubernetes API at 127\.0\.0\.1:\d+ does not answer: "):
        ask()


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "MANTA_NODE_NAME"])
def test_kubernetes_source_without_its_environment_variables_names_the_node_name_variable(
    api, ask, monkeypatch, missing
):
    monkeypatch.delenv(missing)
    with pytest.raises(SourceUnavailable, match=r"MANTA_NODE_NAME must be its spec\.nodeName"):
        ask()


def test_missing_service_account_token_makes_the_kubernetes_source_unavailable(api, ask):
    (api.folder / "token").unlink()
    with pytest.raises(SourceUnavailable, match=r"does not answer: .*token"):
        ask()
