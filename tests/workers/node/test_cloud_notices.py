"""What each cloud says before it takes a machine, and what is made of it."""

from datetime import UTC, datetime

import pytest
from metadata_service import MetadataService

from manta.workers.node import cloud_notices
from manta.workers.node.cloud_notices import (
    GCP_MAINTENANCE_SECONDS,
    GCP_PREEMPTED_SECONDS,
    MetadataSource,
    MetadataUnavailable,
)
from manta.workers.node.notices import Notice

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
        "spot terminate 2026-11-24T12:02:00Z", 120.0, "AWS takes the spot instance back (terminate)"
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
