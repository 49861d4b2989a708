"""Lines that were fetched are remembered until they are kept for good, in bounded memory."""

import asyncio

import pytest

from manta.workers.protocol.reports import Event, Printed
from manta.workers.rank.report_buffer import ReportBuffer, UnconfirmedLines


def filled(*payloads):
    buffer = ReportBuffer()
    for payload in payloads:
        buffer.add(payload, 1, 0)
    return buffer


@pytest.fixture
def read():
    """Reads a buffer; the sequences of what comes."""
    with asyncio.Runner() as runner:
        yield lambda buffer, after, kept=None: [report.sequence for report in runner.run(buffer.read(after, 0.0, kept))]


def line(text="x"):
    return Printed("stdout", (text,))


def test_report_buffer_repeats_only_log_lines_that_are_not_stored_yet(read):
    buffer = filled(line(), Event("e", "m"), line(), line())
    assert read(buffer, 0, (0, 0, 0)) == [1, 2, 3, 4]
    assert read(buffer, 3, (0, 0, 0)) == [4]
    assert read(buffer, 0, (0, 0, 0)) == [1, 3, 4], "to whoever takes over"
    assert read(buffer, 3, (0, 1, 1)) == [4]
    assert read(buffer, 0, (0, 1, 1)) == [3, 4]
    assert read(buffer, 0, (1, 7, 9)) == [3, 4], "of another rank, which this agent was before"
    assert read(buffer, 4, (0, 2, 0)) == read(buffer, 0, (0, 2, 0)) == []


def test_log_lines_are_forgotten_at_once_if_they_are_not_stored_elsewhere(read):
    buffer = filled(line(), line())
    assert read(buffer, 0) == [1, 2]
    assert read(buffer, 2) == read(buffer, 0) == []


def test_oldest_unkept_lines_are_dropped_with_a_note_if_too_many():
    async def reports():
        buffer = filled(*(line("y" * 100) for _ in range(20)))
        return await buffer.read(0, 0.0)

    lines = UnconfirmedLines(max_characters=1000)
    for report in asyncio.run(reports()):
        lines.add(report)
    left = lines.after(0)
    assert left[-1].sequence == 20
    assert [report.sequence for report in left] == list(range(left[0].sequence, 21))
    assert "lines may be missing here" in left[0].payload.lines[0]
    assert sum(len(report.payload.lines[0]) for report in left[1:]) <= 1000
