"""What a cloud says before it takes a machine, asked of the machine's own metadata service.

| cloud | asked | says |
| --- | --- | --- |
| AWS | `spot/instance-action` | a spot instance is stopped or terminated at a time, two minutes ahead |
| AWS | `events/maintenance/scheduled` | a reboot, stop or retirement of the instance, days ahead |
| GCP | `instance/preempted` | a spot or preemptible machine ends in 30 s |
| GCP | `instance/maintenance-event` | a machine that cannot be moved live ends, at least 60 s ahead |
| Azure | `scheduledevents` | preemption (30 s ahead), termination, reboot, redeployment, at a time |

Each cloud's answers become a `Notice` by a pure function. What a service does not answer is unknown, not "no notice".
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from manta.workers.node.notices import Notice, SourceUnavailable, most_urgent

Cloud = Literal["aws", "gcp", "azure"]
CLOUDS: tuple[Cloud, ...] = get_args(Cloud)
SERVICES: dict[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
}
"""Address of each cloud's metadata service."""
ANSWER_SECONDS = 2.0
LEAD_SECONDS = 600.0
"""Maintenance that is announced days ahead is acted on when it is this near."""
GCP_PREEMPTED_SECONDS, GCP_MAINTENANCE_SECONDS = 30.0, 60.0
AZURE_PREEMPT_SECONDS = 30.0
"""An Azure event without a time may begin at once; a preemption happens this long after its notice."""
_TOKEN_SECONDS = "21600"
_AWS_ENDS = {"instance-reboot", "system-reboot", "instance-stop", "instance-retirement"}
_AZURE_ENDS = {"Reboot", "Redeploy", "Preempt", "Terminate"}
_MAX_BYTES = 1 << 20


class MetadataUnavailable(SourceUnavailable):
    """The metadata service does not answer, or gives an unexpected answer."""


@dataclass(frozen=True)
class MetadataSource:
    """Identifies the metadata service that is asked."""

    cloud: Cloud
    url: str

    @property
    def name(self) -> str:
        """The cloud's name."""
        return self.cloud

    def notice(self, now: datetime) -> Notice | None:
        """The cloud's notice at `now`, by this machine's clock; None if there is none. Raises MetadataUnavailable."""
        return _QUERIES[self.cloud](_Service(self.url), now)


def aws_spot_notice(document: Any, now: datetime) -> Notice | None:
    """The notice in `spot/instance-action`."""
    at = datetime.fromisoformat(document["time"])
    action = document["action"]
    return Notice(
        f"spot {action} {document['time']}", _seconds_until(at, now), f"AWS reclaims the spot instance ({action})"
    )


def aws_maintenance_notice(document: Any, now: datetime) -> Notice | None:
    """The most urgent event in `events/maintenance/scheduled` that is near; None if there is none."""
    notices = []
    for event in document:
        at = parsedate_to_datetime(event["NotBefore"])
        if (
            event.get("State", "active") == "active"
            and event["Code"] in _AWS_ENDS
            and _seconds_until(at, now) <= LEAD_SECONDS
        ):
            name = event.get("EventId", f"{event['Code']} {event['NotBefore']}")
            notices.append(
                Notice(str(name), _seconds_until(at, now), f"AWS has scheduled maintenance ({event['Code']})")
            )
    return most_urgent(notices)


def gcp_notice(preempted: str, maintenance: str) -> Notice | None:
    """The notice in `instance/preempted` and `instance/maintenance-event`; None if there is none."""
    if preempted.strip() == "TRUE":
        return Notice("preempted", GCP_PREEMPTED_SECONDS, "Google Cloud preempts the machine")
    if maintenance.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("maintenance", GCP_MAINTENANCE_SECONDS, "Google Cloud has scheduled maintenance of the host")
    return None


def azure_notice(document: Any, name: str, now: datetime) -> Notice | None:
    """The most urgent event in `scheduledevents` that ends the machine called `name`, which a freeze of some seconds
    does not; None if there is none."""
    notices = []
    for event in document["Events"]:
        kind = event["EventType"]
        if kind not in _AZURE_ENDS or name not in event["Resources"]:
            continue
        default_seconds = AZURE_PREEMPT_SECONDS if kind == "Preempt" else 0.0
        seconds = (
            _seconds_until(parsedate_to_datetime(event["NotBefore"]), now)
            if event.get("NotBefore")
            else default_seconds
        )
        if seconds <= LEAD_SECONDS:
            notices.append(Notice(str(event["EventId"]), seconds, f"Azure has scheduled an event ({kind})"))
    return most_urgent(notices)


def _seconds_until(at: datetime, now: datetime) -> float:
    return max(0.0, ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds())


class _Service:
    """Asks one metadata service, without any proxy."""

    def __init__(self, url: str):
        self._host = urlsplit(url).netloc

    def get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """The answer; None if there is nothing at `path`. Raises MetadataUnavailable."""
        connection = http.client.HTTPConnection(self._host, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            content = response.read(_MAX_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise MetadataUnavailable(f"the metadata service at {self._host} does not answer: {error}") from error
        finally:
            connection.close()
        if response.status == 404:
            return None
        if response.status != 200:
            raise MetadataUnavailable(f"the metadata service at {self._host} answers {path} with {response.status}")
        return content


def _parsed(read: Callable[..., Notice | None], content: str, *about: Any) -> Notice | None:
    """The result of `read` for a JSON document. Raises MetadataUnavailable if its form is unknown."""
    try:
        return read(json.loads(content), *about)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MetadataUnavailable(f"the metadata service gave an unknown answer: {content[:200]!r}") from error


def _query_aws(service: _Service, now: datetime) -> Notice | None:
    wanted = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
    token = service.get("/latest/api/token", wanted, "PUT")
    headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
    spot = service.get("/latest/meta-data/spot/instance-action", headers)
    if spot is not None:
        return _parsed(aws_spot_notice, spot, now)
    maintenance = service.get("/latest/meta-data/events/maintenance/scheduled", headers)
    return None if maintenance is None else _parsed(aws_maintenance_notice, maintenance, now)


def _query_gcp(service: _Service, now: datetime) -> Notice | None:
    headers, instance = {"Metadata-Flavor": "Google"}, "/computeMetadata/v1/instance"
    preempted = service.get(f"{instance}/preempted", headers)
    maintenance = service.get(f"{instance}/maintenance-event", headers)
    return gcp_notice(preempted or "", maintenance or "")


def _query_azure(service: _Service, now: datetime) -> Notice | None:
    headers = {"Metadata": "true"}
    events = service.get("/metadata/scheduledevents?api-version=2020-07-01", headers)
    if events is None:
        return None
    name = service.get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    return _parsed(azure_notice, events, (name or "").strip(), now)


_QUERIES: dict[Cloud, Callable[[_Service, datetime], Notice | None]] = {
    "aws": _query_aws,
    "gcp": _query_gcp,
    "azure": _query_azure,
}
