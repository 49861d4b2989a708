"""Notices that a machine is about to go away, from clouds and Kubernetes."""

import logging
import threading
from datetime import UTC, datetime

import pytest
from kubernetes_api import KubernetesApi, make_certificate
from metadata_service import MetadataService

from manta.workers.node import cloud_notices
from manta.workers.node import notice_sources as module
from manta.workers.node.cloud_notices import (
    GCP_MAINTENANCE_SECONDS,
    GCP_PREEMPTED_SECONDS,
    MetadataSource,
    MetadataUnavailable,
)
from manta.workers.node.notice_sources import (
    CONDITIONS,
    TAINTS,
    KubernetesSource,
    SlurmSource,
    UnknownSource,
    node_notice,
    notice_sources,
)
from manta.workers.node.notices import NOTICE_SECONDS, Notice, NoticeWatch, SourceUnavailable


def test_notice_sources_have_default_settings_that_can_be_overridden():
    assert notice_sources("aws") == [MetadataSource("aws", "http://169.254.169.254")]
    assert notice_sources("gcp=http://there:80") == [MetadataSource("gcp", "http://there:80")]
    assert notice_sources("slurm") == [SlurmSource(600.0)]
    assert notice_sources("slurm=90") == [SlurmSource(90.0)]
    assert notice_sources("kubernetes") == [KubernetesSource({})]
    further = {"example.com/sold": 90.0, "example.com/rented": None}
    assert notice_sources("kubernetes=example.com/sold:90+example.com/rented") == [KubernetesSource(further)]


def test_notice_sources_are_separated_by_commas():
    assert [source.name for source in notice_sources("aws, kubernetes,slurm=5")] == ["aws", "kubernetes", "slurm"]


@pytest.mark.parametrize("text", [
    "", "AWS", "oracle", "aws=ftp://there", "aws=there", "aws,", "slurm=soon", "slurm=-1", "slurm=inf", "slurm=nan",
    "kubernetes=:5", "kubernetes=a:b", "kubernetes=a:-1", "kubernetes=a:inf", "kubernetes=a:nan",
])  # fmt: skip
def test_unknown_notice_source_is_refused_with_the_known_ones(text):
    with pytest.raises(UnknownSource, match=r"is not a known source of notices: use aws, gcp, azure, .* with commas$"):
        notice_sources(text)


NOW = datetime(2026, 11, 24, 12, 0, 0, tzinfo=UTC)
SPOT, PLANNED = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/maintenance/scheduled"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(cloud_notices, "ANSWER_SECONDS", 30.0)  # however busy the machine is
    made = MetadataService()
    yield made
    made.close()


@pytest.fixture
def ask(service):
    return lambda cloud: MetadataSource(cloud, service.url).notice(NOW)


def maintenance(at, code="system-reboot", **more):
    return {"NotBefore": at, "Code": code, "State": "active", "EventId": f"event of {at}", **more}


def event(kind, at="", resources=("vm-1",), **more):
    return {"EventId": f"{kind} {at}", "EventType": kind, "Resources": list(resources), "NotBefore": at, **more}


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_cloud_without_planned_events_gives_no_notice(service, ask, cloud):
    service.answers = {"/latest/api/token": "token", PREEMPTED: "FALSE", MAINTENANCE: "NONE", NAME: "vm-1"}
    service.answers[EVENTS] = {"DocumentIncarnation": 1, "Events": []}
    assert ask(cloud) is None


def test_aws_spot_interruption_gives_a_notice_with_its_deadline(service, ask):
    service.required = {"X-aws-ec2-metadata-token": "token"}
    service.answers = {"/latest/api/token": "token", SPOT: {"action": "terminate", "time": "2026-11-24T12:02:00Z"}}
    assert ask("aws") == Notice(
        "spot terminate 2026-11-24T12:02:00Z", 120.0, "AWS reclaims the spot instance (terminate)"
    )
    assert service.asked[0] == "PUT /latest/api/token"


def test_aws_metadata_service_without_tokens_is_asked_without_one(service, ask):
    service.answers = {SPOT: {"action": "stop", "time": "2026-11-24T11:59:00Z"}}
    assert ask("aws").seconds == 0.0


@pytest.mark.parametrize(("events", "seconds"), [
    ([maintenance("24 Nov 2026 12:05:00 GMT")], 300.0),
    ([maintenance("24 Nov 2026 12:09:00 GMT"), maintenance("24 Nov 2026 12:03:00 GMT")], 180.0),
    ([maintenance("25 Nov 2026 12:00:00 GMT")], None),
    ([maintenance("24 Nov 2026 12:05:00 GMT", State="completed")], None),
    ([maintenance("24 Nov 2026 12:05:00 GMT", State="canceled")], None),
    ([maintenance("24 Nov 2026 12:05:00 GMT", code="system-maintenance")], None),
    ([maintenance("24 Nov 2026 12:05:00 GMT", code="instance-retirement")], 300.0),
    ([], None),
])  # fmt: skip
def test_aws_announces_work_days_ahead_which_is_heeded_when_it_is_near(service, ask, events, seconds):
    service.answers = {PLANNED: events}
    assert getattr(ask("aws"), "seconds", None) == seconds


def test_google_cloud_preemption_and_maintenance_give_notices_but_live_migration_none(service, ask):
    service.required = {"Metadata-Flavor": "Google"}
    service.answers = {PREEMPTED: "FALSE\n", MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE\n"}
    assert ask("gcp").seconds == GCP_MAINTENANCE_SECONDS
    service.answers = {PREEMPTED: "TRUE", MAINTENANCE: "NONE"}
    assert (ask("gcp").seconds, ask("gcp").reason) == (GCP_PREEMPTED_SECONDS, "Google Cloud preempts the machine")
    service.answers[PREEMPTED] = "FALSE"
    service.answers[MAINTENANCE] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert ask("gcp") is None, "a machine that is moved while it runs is not taken"


@pytest.mark.parametrize(("events", "expected"), [
    ([event("Preempt", "Tue, 24 Nov 2026 12:00:30 GMT")], (30.0, "Preempt")),
    ([event("Preempt")], (30.0, "Preempt")),
    ([event("Terminate", "Tue, 24 Nov 2026 12:05:00 GMT"), event("Reboot", "Tue, 24 Nov 2026 12:02:00 GMT")],
     (120.0, "Reboot")),
    ([event("Redeploy", EventStatus="Started")], (0.0, "Redeploy")),
    ([event("Freeze", "Tue, 24 Nov 2026 12:00:30 GMT")], None),
    ([event("Preempt", "Tue, 24 Nov 2026 12:00:30 GMT", resources=["vm-2"])], None),
    ([event("Reboot", "Tue, 24 Nov 2026 13:00:00 GMT")], None),
])  # fmt: skip
def test_azure_gives_a_notice_of_the_nearest_event_that_ends_this_machine(service, ask, events, expected):
    service.required = {"Metadata": "true"}
    service.answers = {EVENTS: {"DocumentIncarnation": 1, "Events": events}, NAME: "vm-1"}
    notice = ask("azure")
    assert expected == (None if notice is None else (notice.seconds, notice.reason.partition("(")[2].rstrip(")")))


@pytest.mark.parametrize(("cloud", "answers"), [
    ("aws", {SPOT: "no JSON"}), ("aws", {SPOT: {"action": "stop"}}),
    ("aws", {SPOT: {"action": "stop", "time": "soon"}}),
    ("aws", {SPOT: 503}), ("aws", {PLANNED: [{"Code": "x"}]}), ("aws", {PLANNED: [3]}), ("gcp", {PREEMPTED: 500}),
    ("azure", {EVENTS: {"Events": None}, NAME: "vm-1"}), ("azure", {EVENTS: [], NAME: "vm-1"}),
    ("azure", {EVENTS: 429, NAME: "vm-1"}),
])  # fmt: skip
def test_unusable_cloud_metadata_makes_the_notice_source_unavailable(service, ask, cloud, answers):
    service.answers = answers
    with pytest.raises(MetadataUnavailable):
        ask(cloud)


def test_unreachable_cloud_metadata_service_is_unavailable_with_its_address():
    with pytest.raises(MetadataUnavailable, match=r"^the metadata service at 127\.0\.0\.1:9 does not answer: "):
        MetadataSource("gcp", "http://127.0.0.1:9").notice(NOW)


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
    monkeypatch.setattr(module, "ANSWER_SECONDS", 30.0)  # however busy the machine is
    yield made
    made.close()


@pytest.fixture
def ask_kubernetes(api):
    return lambda **further: KubernetesSource(further, api.folder).notice(NOW)


def taint(key, effect="NoSchedule"):
    return {"key": key, "effect": effect}


def test_kubernetes_source_requests_only_its_own_node(api, ask_kubernetes):
    assert ask_kubernetes() is None
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
def test_only_kubernetes_taints_that_end_a_node_give_a_notice(api, ask_kubernetes, taints, expected):
    api.taints = [taint(key) for key in taints]
    notice = ask_kubernetes()
    if expected is None:
        assert notice is None
    else:
        key, seconds = expected
        assert notice == Notice(f"taint {key}", seconds, f"Kubernetes has tainted the node with {key}")


def test_custom_kubernetes_taints_give_a_notice_with_their_configured_deadline(api, ask_kubernetes):
    api.taints = [taint("example.com/sold", "NoExecute"), taint("example.com/rented")]
    assert ask_kubernetes() is None
    assert ask_kubernetes(**{"example.com/rented": None}).id == "taint example.com/rented"
    assert ask_kubernetes(**{"example.com/rented": None, "example.com/sold": 90.0}).seconds == 90.0


@pytest.mark.parametrize(("kind", "status", "heeded"), [
    ("PreemptScheduled", "True", True), ("PreemptScheduled", "False", False), ("PreemptScheduled", "Unknown", False),
    ("TerminateScheduled", "True", True), ("FreezeScheduled", "True", False), ("VMEventScheduled", "True", False),
    ("Ready", "True", False),
])  # fmt: skip
def test_only_kubernetes_conditions_that_end_a_node_give_a_notice(api, ask_kubernetes, kind, status, heeded):
    api.conditions = [{"type": "Ready", "status": "True"}, {"type": kind, "status": status}]
    expected = Notice(f"condition {kind}", SOON, f"Kubernetes says {kind} of the node") if heeded else None
    assert ask_kubernetes() == expected


def test_node_with_a_deletion_timestamp_gets_a_deletion_notice(api, ask_kubernetes):
    api.metadata["deletionTimestamp"] = "2026-11-24T12:00:00Z"
    assert ask_kubernetes() == Notice("deletion", SOON, "the node is being deleted from Kubernetes")


def test_kubernetes_taints_and_conditions_are_read_from_the_node_document():
    for key, seconds in TAINTS.items():
        assert node_notice({"metadata": {}, "spec": {"taints": [taint(key)]}}, TAINTS).seconds == seconds
    for kind in CONDITIONS:
        document = {"metadata": {}, "spec": {}, "status": {"conditions": [{"type": kind, "status": "True"}]}}
        assert node_notice(document, TAINTS).id == f"condition {kind}"


@pytest.mark.parametrize("status", [401, 403])
def test_account_that_may_not_read_nodes_is_one_clear_sentence(api, ask_kubernetes, status):
    api.status = status
    with pytest.raises(SourceUnavailable) as refusal:
        ask_kubernetes()
    assert str(refusal.value) == (
        f"the Kubernetes API at 127.0.0.1:{api.port} does not let the pod read node n1 ({status}): bind its service "
        "account to a ClusterRole that may `get` `nodes`"
    )


def test_kubernetes_token_is_read_again_for_each_request(api, ask_kubernetes):
    """Kubernetes renews it."""
    api.token = "another token"
    with pytest.raises(SourceUnavailable, match="does not let the pod read node n1"):
        ask_kubernetes()
    (api.folder / "token").write_text("another token")
    assert ask_kubernetes() is None


def test_kubernetes_api_with_an_untrusted_certificate_receives_no_request(api, ask_kubernetes):
    make_certificate(api.folder)
    with pytest.raises(SourceUnavailable, match=r"does not answer: .*certificate verify failed"):
        ask_kubernetes()
    assert api.asked == []


@pytest.mark.parametrize(("status", "content", "sentence"), [
    (404, b"", r"knows no node n1: MANTA_NODE_NAME must be the pod's spec\.nodeName$"),
    (503, b"", r"answers with 503$"),
    (200, b"no JSON", r"answers with what is no JSON$"),
    (200, b"[]", r"gave an unknown answer about node n1$"),
    (200, b'{"metadata": {}, "spec": {"taints": [{}]}}', r"gave an unknown answer about node n1$"),
])  # fmt: skip
def test_unusable_kubernetes_answer_makes_the_notice_source_unavailable(api, ask_kubernetes, status, content, sentence):
    api.status, api.content = status, content
    with pytest.raises(SourceUnavailable, match=sentence):
        ask_kubernetes()


def test_unreachable_kubernetes_api_makes_the_notice_source_unavailable(api, ask_kubernetes):
    api.close()
    with pytest.raises(SourceUnavailable, match=r"^the Kubernetes API at 127\.0\.0\.1:\d+ does not answer: "):
        ask_kubernetes()


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "MANTA_NODE_NAME"])
def test_kubernetes_source_without_its_environment_variables_names_the_node_name_variable(
    api, ask_kubernetes, monkeypatch, missing
):
    monkeypatch.delenv(missing)
    with pytest.raises(SourceUnavailable, match=r"MANTA_NODE_NAME must be its spec\.nodeName"):
        ask_kubernetes()


def test_missing_service_account_token_makes_the_kubernetes_source_unavailable(api, ask_kubernetes):
    (api.folder / "token").unlink()
    with pytest.raises(SourceUnavailable, match=r"does not answer: .*token"):
        ask_kubernetes()


@pytest.fixture
def watch(service):
    noticed = []
    made = NoticeWatch(MetadataSource("gcp", service.url), noticed.append, lambda: noticed.append(None), 0.02)
    made.noticed = noticed
    yield made
    made.stop()


def test_notice_watch_passes_on_each_different_notice_once(service, watch):
    for _ in range(3):
        watch.poll()
    assert watch.noticed == []
    service.answers = {MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}
    watch.poll()
    watch.poll()
    service.answers[PREEMPTED] = "TRUE"
    watch.poll()
    watch.poll()
    assert [notice.seconds for notice in watch.noticed] == [60.0, 30.0]


def test_notice_that_no_longer_holds_is_withdrawn_once_and_can_return(service, watch):
    for answer in ("TRUE", "FALSE", "FALSE", "TRUE"):
        service.answers = {PREEMPTED: answer}
        watch.poll()
    assert [notice and notice.seconds for notice in watch.noticed] == [30.0, None, 30.0]


def test_notice_is_not_withdrawn_while_its_source_does_not_answer(service, watch):
    for answer in ("TRUE", 503, "TRUE"):
        service.answers = {PREEMPTED: answer}
        watch.poll()
    assert [notice.seconds for notice in watch.noticed] == [30.0]


def test_notice_without_a_deadline_is_passed_on_without_one(caplog):
    class Cordon:
        name = "a cordon"

        def notice(self, now):
            return Notice("cordon", None, "it is cordoned")

    noticed = []
    NoticeWatch(Cordon(), noticed.append, lambda: None).poll()
    assert noticed == [Notice("cordon", None, "it is cordoned")]
    assert [record.message for record in caplog.records] == ["it is cordoned: this machine is being drained"]


def test_notice_source_that_refuses_is_logged_once(caplog):
    class Refuses:
        name = "who refuses"

        def notice(self, now):
            raise SourceUnavailable("you may not ask")

    watch = NoticeWatch(Refuses(), lambda notice: None, lambda: None)
    for _ in range(3):
        watch.poll()
    assert [record.message for record in caplog.records] == ["you may not ask; retrying"]


def test_notice_source_that_is_silent_gives_no_notice_and_is_logged_once(service, watch, caplog):
    service.answers = {PREEMPTED: 503}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.poll()
        service.answers = {}
        watch.poll()
    assert watch.noticed == []
    assert [record.message.partition(";")[0].rpartition(" ")[2] for record in caplog.records] == ["503", "again"]


def test_notice_watch_polls_until_it_is_stopped(service, watch):
    passed_on = threading.Event()
    watch._noticed = lambda notice: passed_on.set()
    watch.start()
    service.answers = {PREEMPTED: "TRUE"}
    assert passed_on.wait(30)
    watch.stop()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
