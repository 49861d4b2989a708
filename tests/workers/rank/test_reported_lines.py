"""Lines that go with the reports: in order, and never more than may wait."""

import asyncio

import pytest

from manta.workers.protocol.reports import Event, Printed, Report
from manta.workers.rank import report_buffer
from manta.workers.rank.rank_log import ReportedLines
from manta.workers.rank.report_buffer import ReportBuffer


def waiting(buffer):
    return asyncio.run(buffer.read(0, 0.0))


def test_lines_wait_with_the_other_reports_of_their_rank():
    buffer = ReportBuffer()
    lines = ReportedLines(buffer, 3)
    lines.write(2, "stdout", ["one", "two"])
    lines.write(2, "stdout", [])
    buffer.add(Event("said"), 2, 3)
    printed, said = waiting(buffer)
    assert (printed.payload, printed.generation, printed.rank) == (Printed("stdout", ("one", "two")), 2, 3)
    assert (said.kind, said.sequence) == ("event", 2)
    assert Report.from_json(printed.to_json()) == printed


def test_reported_lines_beyond_the_limit_are_dropped_oldest_first_with_a_note(monkeypatch):
    monkeypatch.setattr(report_buffer, "MAX_LINES", 10)
    buffer = ReportBuffer()
    lines = ReportedLines(buffer, 0)
    for number in range(40):
        lines.write(1, "stdout", [f"line {number}"])
        buffer.add(Event("said"), 1, 0)
    reports = waiting(buffer)
    events = [report for report in reports if report.kind == "event"]
    printed = [text for report in reports if report.kind == "printed" for text in report.payload.lines]
    assert len(events) == 40 and len(printed) <= 11
    assert printed[-1] == "line 39" and "lines are left out here" in printed[0]
    sequences = [report.sequence for report in reports]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("taken", [0, 25])
def test_reported_lines_have_room_again_after_lines_are_taken(monkeypatch, taken):
    monkeypatch.setattr(report_buffer, "MAX_LINES", 10)
    buffer = ReportBuffer()
    lines = ReportedLines(buffer, 0)
    for number in range(9):
        lines.write(1, "stdout", [f"line {number}"])
    asyncio.run(buffer.read(9 if taken else 0, 0.0))
    for number in range(9, 18):
        lines.write(1, "stdout", [f"line {number}"])
    texts = [text for report in waiting(buffer) for text in report.payload.lines]
    assert any("left out" in text for text in texts) == (not taken)
