"""From what a trainer's engine says to what its agent reads: messages of the reporter become lines of JSON."""

from __future__ import annotations

import json
import time
from typing import Any

from workers.protocol.messages import LaunchOrder
from workers.protocol.reports import Event, Metrics, Payload, Report, payload_of


def reports_of(order: LaunchOrder, messages: list[dict[str, Any]]) -> list[Report]:
    """The reporter's `messages` as reports of the order's rank and generation; rows of metrics that follow each other
    become one."""
    reports = []
    for kind, batch in _runs(messages):
        if kind == "metrics":
            rows = Metrics(tuple(item["data"] for item in batch))
            reports.append(Report(rows, order.generation, order.rank, time.time()))
        else:
            reports += [Report(_payload(item), order.generation, order.rank, item["time"]) for item in batch]
    return reports


def _payload(message: dict[str, Any]) -> Payload:
    data = dict(message["data"])
    if message["kind"] != "event":
        return payload_of(message["kind"], data)
    return Event(data.pop("type"), data.pop("message"), data.pop("step"), data)


def report_lines(reports: list[Report]) -> bytes:
    """The reports as the agent reads them."""
    return "".join(json.dumps(report.to_json()) + "\n" for report in reports).encode()


def _runs(messages: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Neighbouring messages of one kind together, order kept."""
    runs: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        if not runs or runs[-1][0] != message["kind"]:
            runs.append((message["kind"], []))
        runs[-1][1].append(message)
    return runs
