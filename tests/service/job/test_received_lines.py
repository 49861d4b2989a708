"""What ranks print on other machines is in the job's log files: each line once, as agents would write it."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manta.service.job import received_lines
from manta.service.job.received_lines import ReceivedLines
from manta.service.logs.pages import LogFiles, read_page
from manta.workers.protocol.reports import Printed, Report


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A disk that is merely slow answers."""
    monkeypatch.setattr(received_lines, "DISK_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs"


def take(lines, sequence, *texts, generation=1, rank=0, at=7.5):
    printed = Printed("stderr", texts)
    asyncio.run(lines.take(Report(printed, generation, rank, at, sequence), printed))


def texts_in(folder):
    return [line.text for line in read_page(LogFiles(folder), {}).lines]


def test_received_log_lines_are_readable_like_local_ones(folder):
    take(ReceivedLines(folder), 3, "one", "two", generation=2, rank=4)
    first, second = read_page(LogFiles(folder), {}).lines
    assert (first.text, second.text) == ("one", "two")
    assert (first.rank, first.generation, first.stream, first.time) == (4, 2, "stderr", 7.5)


def test_received_report_of_lines_is_stored_once_across_control_planes(folder):
    lines = ReceivedLines(folder)
    for sequence in (1, 2, 2, 1):
        take(lines, sequence, f"of {sequence}", "and more")
    for sequence in (2, 3):
        take(ReceivedLines(folder), sequence, f"of {sequence}")
    assert texts_in(folder) == ["of 1", "and more", "of 2", "and more", "of 3"]


def test_received_lines_of_a_new_agent_are_counted_anew(folder):
    take(ReceivedLines(folder), 9, "first agent")
    take(ReceivedLines(folder), 1, "second agent", generation=2)
    assert texts_in(folder) == ["first agent", "second agent"]


@pytest.mark.parametrize("damage", [b'{"generation": 5, "sequ', b"no JSON at all\n", b"[]\n"])
def test_log_line_cut_short_by_a_crash_loses_no_later_line(folder, damage):
    take(ReceivedLines(folder), 1, "before")
    with (folder / "rank-00000.jsonl").open("ab") as file:
        file.write(damage)
    take(ReceivedLines(folder), 2, "cut, perhaps")
    take(ReceivedLines(folder), 3, "after")
    assert texts_in(folder)[0] == "before" and texts_in(folder)[-1] == "after"


async def test_received_lines_on_a_hanging_disk_leave_other_threads_free(folder):
    lines, printed = ReceivedLines(folder), Printed("stdout", ("late",))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with lines.lock:  # as whoever writes has it
        taking = asyncio.create_task(lines.take(Report(printed, 1, 0, 7.5, 1), printed))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), 20) == "read"
    await taking
    assert texts_in(folder) == ["late"]


def test_received_lines_are_lost_with_a_log_entry_if_the_disk_is_unusable(folder, caplog):
    folder.write_text("a file in the folder's place")
    take(ReceivedLines(folder), 1, "lost")
    assert "1 lines of rank 0 are lost" in caplog.text
    folder.unlink()
    take(ReceivedLines(folder), 2, "there is room again")
    assert texts_in(folder) == ["there is room again"]


@pytest.mark.parametrize("be", [os.mkfifo, Path.mkdir])
def test_pipe_or_folder_in_the_place_of_a_log_is_replaced(folder, be):
    folder.mkdir()
    be(folder / "rank-00000.jsonl")
    take(ReceivedLines(folder), 1, "kept")
    assert texts_in(folder) == ["kept"]


async def test_received_lines_on_a_hanging_disk_delay_no_report(folder, monkeypatch):
    """The death of the rank is in one of them."""
    lines = ReceivedLines(folder)
    monkeypatch.setattr(received_lines, "DISK_SECONDS", 0.01)

    async def say(text, sequence):
        printed = Printed("stderr", (text,))
        await lines.take(Report(printed, 1, 0, 7.5, sequence), printed)

    async with asyncio.timeout(20):
        with lines.lock:
            await say("late", 1)
            await say("lost", 2)
        while lines._overdue:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(received_lines, "DISK_SECONDS", 60.0)
        await say("after", 3)
    assert texts_in(folder) == ["late", "after"]
