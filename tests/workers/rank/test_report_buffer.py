"""Reports wait for their reader, each once, and never take more memory than they may."""

import asyncio
from itertools import pairwise

import pytest

from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.protocol.reports import Event, Exited, Metrics
from manta.workers.rank import report_buffer
from manta.workers.rank.report_buffer import ReportBuffer


def read_all(buffer):
    """Every report that waits, acknowledged read by read."""

    async def read():
        everything, after = [], 0
        while reports := await buffer.read(after, 0.01):
            everything += reports
            after = reports[-1].sequence
        return everything

    return asyncio.run(read())


def add_rows(buffer, steps):
    buffer.add(Metrics(tuple({"step": step} for step in steps)), 1, 0)


def steps_of(reports):
    return [row["step"] for report in reports if report.kind == "metrics" for row in report.payload.rows]


def test_report_buffer_keeps_thousands_of_unread_rows_complete_and_once():
    buffer = ReportBuffer()
    for first in range(1, 20_001, 4):
        add_rows(buffer, range(first, first + 4))
    reports = read_all(buffer)
    assert steps_of(reports) == list(range(1, 20_001))
    assert [report.sequence for report in reports] == list(range(1, 5001))


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_report_buffer_thins_out_old_rows_when_full_and_keeps_other_reports(batch):
    buffer = ReportBuffer(max_rows=100)
    for first in range(1, 1001, batch):
        add_rows(buffer, range(first, min(1001, first + batch)))
        if first == 1:
            buffer.add(Event("told"), 1, 0)
    buffer.add(Exited(code=0), 1, 0)
    reports = read_all(buffer)
    steps = steps_of(reports)
    assert len(steps) <= 100
    assert steps == sorted(set(steps))
    assert steps[-1] == 1000, "the last row is what a job's progress is known by"
    assert max(later - earlier for earlier, later in pairwise([0, *steps])) <= 32, "from the first step on"
    assert len(reports) <= 102, "a report that has lost all of its rows takes no memory either"
    assert [report.kind for report in reports if report.kind != "metrics"] == ["event", "exit"]


def test_report_buffer_has_room_again_after_rows_are_read():
    async def read_as_they_come():
        buffer, steps = ReportBuffer(max_rows=20), []
        for batch in range(10):
            add_rows(buffer, range(10 * batch + 1, 10 * batch + 11))
            steps += steps_of(await buffer.read(batch, 0.01))
        return steps

    assert asyncio.run(read_as_they_come()) == list(range(1, 101))


def test_report_buffer_thins_every_second_row_again_after_a_full_read():
    """However long the reader was gone before that."""
    buffer = ReportBuffer(max_rows=20)
    for step in range(1, 1001):
        add_rows(buffer, [step])
    thinned = steps_of(read_all(buffer))
    assert max(later - earlier for earlier, later in pairwise(thinned)) > 32
    for step in range(1001, 1022):
        add_rows(buffer, [step])

    async def read():
        return await buffer.read(1000, 0.01)

    assert steps_of(asyncio.run(read())) == [*range(1002, 1021, 2), 1021]


async def test_report_buffer_answers_the_newest_reader_and_releases_earlier_ones():
    buffer = ReportBuffer()
    first = asyncio.create_task(buffer.read(0, 3600.0))
    await asyncio.sleep(0)
    second = asyncio.create_task(buffer.read(0, 3600.0))
    assert await first == []
    assert not second.done()
    add_rows(buffer, [1])
    assert steps_of(await second) == [1]


async def test_report_buffer_repeats_unacknowledged_reports_unchanged():
    buffer = ReportBuffer()
    buffer.add(Exited(code=0), 3, 5, when=7.0)
    buffer.add(Exited(code=1), 4, 6, when=8.0)
    first = await buffer.read(0, 0.01)
    assert [(each.generation, each.rank, each.time, each.sequence) for each in first] == [
        (3, 5, 7.0, 1),
        (4, 6, 8.0, 2),
    ]
    assert await buffer.read(0, 0.01) == first, "the answer to the read before may have been lost"
    assert await buffer.read(1, 0.01) == first[1:]


async def test_report_without_a_time_gets_the_current_one(monkeypatch):
    monkeypatch.setattr(report_buffer.time, "time", lambda: 50.0)
    buffer = ReportBuffer()
    buffer.add(Exited(code=0), 1, 0)
    (report,) = await buffer.read(0, 0.01)
    assert report.time == 50.0


def test_report_buffer_keeps_all_rows_up_to_its_limit():
    buffer = ReportBuffer(max_rows=20)
    for step in range(1, 21):
        add_rows(buffer, [step])
    assert steps_of(read_all(buffer)) == list(range(1, 21))


async def test_report_buffer_limits_the_reports_of_one_read(monkeypatch):
    """Else one answer to a control plane that was gone for an hour would be larger than any message may be."""
    monkeypatch.setattr(report_buffer, "REPORTS_PER_READ", 2)
    buffer = ReportBuffer()
    for code in range(5):
        buffer.add(Exited(code=code), 1, 0)
    sizes, after = [], 0
    while reports := await buffer.read(after, 0.01):
        sizes.append(len(reports))
        after = reports[-1].sequence
    assert (sizes, after) == ([2, 2, 1], 5)


def test_report_buffer_keeps_only_the_newest_sample_of_all_ranks():
    buffer = ReportBuffer()
    for step in range(1, 6):
        sample = RankSample(step, 0.1, None, packed([1.0])) if step != 3 else None
        buffer.add(Metrics(({"step": step},), sample), 1, 0)
    buffer.add(Metrics(({"step": 6},)), 1, 0)
    reports = read_all(buffer)
    assert steps_of(reports) == [1, 2, 3, 4, 5, 6]
    assert [report.payload.ranks and report.payload.ranks.step for report in reports] == [None] * 4 + [5, None]
