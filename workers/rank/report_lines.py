"""Converts messages of a trainer's reporter to the lines of JSON that its agent reads."""

from __future__ import annotations

import json
import time
from itertools import groupby

from workers.protocol.messages import LaunchOrder
from workers.protocol.reports import Message, Metrics, Report


def reports_of(order: LaunchOrder, messages: list[Message]) -> list[Report]:
    """The reporter's `messages` as reports of the order's rank and generation; consecutive rows of metrics become one
    report, with the newest numbers of all ranks among them."""
    reports = []
    for are_metrics, neighbours in groupby(messages, lambda message: isinstance(message.payload, Metrics)):
        if are_metrics:
            payloads = [message.payload for message in neighbours if isinstance(message.payload, Metrics)]
            samples = [each.ranks for each in payloads if each.ranks is not None]
            rows = tuple(row for each in payloads for row in each.rows)
            metrics = Metrics(rows, samples[-1] if samples else None)
            reports.append(Report(metrics, order.generation, order.rank, time.time()))
        else:
            reports += [Report(each.payload, order.generation, order.rank, each.time) for each in neighbours]
    return reports


def report_lines(reports: list[Report]) -> bytes:
    """The reports as lines for the agent."""
    return "".join(json.dumps(report.to_json()) + "\n" for report in reports).encode()
