"""Whatever becomes of control planes and of the store, each line of a job is read once and in order, by all of them."""

import os
import random
import time
from pathlib import Path

import pytest
from s3_server import answer

from manta.service.job import received_lines
from manta.service.log_archive import archived_log, archiver, parts
from manta.service.logs.pages import LogsUnavailable
from manta.service.logs.tail import read_tail
from manta.service.states import JobState
from manta.workers.storage.files import files_of
from tests.service.log_archive.conftest import Agent

RUNNING = (JobState.STARTING, JobState.RUNNING)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """What is tried again is tried soon."""
    monkeypatch.setattr(archiver, "SHIP_SECONDS", 0.2)
    for name in ("LEAVE_SECONDS", "FINISH_SECONDS"):  # however slow the machine is
        monkeypatch.setattr(archiver, name, 60.0)
    monkeypatch.setattr(received_lines, "DISK_SECONDS", 60.0)
    monkeypatch.setattr(archived_log, "ANSWER_SECONDS", 60.0)


@pytest.fixture
def shared(tmp_path):
    """A folder that several machines share: the same as an object store, and quicker."""
    return tmp_path / "shared"


def parts_of(place, job):
    return sorted(files_of(place).names(place / job / "logs"))


def test_kept_log_reads_the_same_through_any_control_plane(make_plane, bucket, job):
    mine, other, agents = make_plane(bucket), make_plane(bucket), [Agent(rank) for rank in range(3)]
    mine.take(job)
    mine.keep()
    for number in range(40):
        for agent in agents:
            agent.tells(mine, f"{number} of {agent.rank}", "and more", at=number + agent.rank / 10)
        if number % 10 == 0:
            mine.keep()
    assert len(other.texts(job)) < 240 == len(mine.texts(job)), "what is not kept yet is read by its owner alone"
    mine.keep()
    assert other.texts(job) == mine.texts(job, limit=7) == other.texts(job, limit=11)
    page = mine.read(job, limit=100)
    assert other.read(job, page.position, limit=100) == mine.read(job, page.position, limit=100)
    assert other.texts(job, rank=1) == [text for n in range(40) for text in (f"{n} of 1", "and more")]
    assert len(parts_of(bucket, job)) == 5


def test_next_owner_continues_a_log_after_its_stored_end(make_plane, shared, job):
    first, second, agent = make_plane(shared), make_plane(shared), Agent()
    first.take(job)
    agent.tells(first, "kept", keep=True)
    agent.tells(first, "fetched, not kept")
    seen = first.read(job).position
    agent.prints("not fetched")
    second.take(job)  # the first one is dead, and so is its disk
    agent.reports_to(second)
    second.keep()
    assert second.texts(job) == ["kept", "fetched, not kept", "not fetched"]
    assert [line.text for line in second.read(job, seen).lines] == ["not fetched"], "cursors of the first one hold"
    third = make_plane(shared)
    third.take(job)
    agent.reports_to(third)
    third.keep()
    assert third.texts(job) == second.texts(job)


def test_log_part_of_a_writer_that_lost_the_job_changes_nothing(make_plane, shared, job):
    first, second, agent = make_plane(shared), make_plane(shared), Agent()
    first.take(job)
    agent.tells(first, "one", keep=True)
    agent.tells(first, "two")
    stale = first.archiver._jobs[job]
    chunks = stale.spool.next_chunks(1 << 20)
    second.take(job)
    agent.tells(second, "three", keep=True)
    stale.writer.write(chunks)
    assert make_plane(shared).texts(job) == ["one", "two", "three"]
    first.leases.certain = False
    agent.tells(second, "four")
    before = parts_of(shared, job)
    first.keep()
    assert parts_of(shared, job) == before, "who is not certain to own it writes nothing"
    second.keep()
    assert make_plane(shared).texts(job) == ["one", "two", "three", "four"]


def test_log_store_outage_only_delays_lines(make_plane, wired_bucket, wire, job):
    mine, agent = make_plane(wired_bucket), Agent()
    mine.take(job)
    agent.tells(mine, "before", keep=True)
    wire.meddle = lambda head: answer("503 Slow Down")
    agent.tells(mine, "meanwhile", keep=True)
    assert mine.texts(job) == ["before", "meanwhile"], "from its own disk"
    other = make_plane(wired_bucket)
    with pytest.raises(LogsUnavailable, match="try again"):
        other.texts(job)
    wire.meddle = lambda head: None
    mine.go_on(lambda: other.texts(job) == ["before", "meanwhile"])


def test_log_upload_pause_stays_bounded_after_thousands_of_failures(make_plane, shared, job):
    plane = make_plane(shared)
    plane.take(job)
    kept = plane.archiver._jobs[job]
    kept.failures, plane.leases.certain = 5000, False
    plane.runner.run(plane.archiver._archive(kept))
    assert kept.failures == 5001
    assert 0 < kept.retry_at - time.monotonic() <= archiver.MAX_BACKOFF_SECONDS


def test_store_that_is_away_when_a_job_is_taken_over_loses_no_line(make_plane, wired_bucket, wire, job):
    first, second, agent = make_plane(wired_bucket), make_plane(wired_bucket), Agent()
    first.take(job)
    for text in ("kept", "not kept"):
        agent.tells(first, text, keep=True)
        wire.meddle = lambda head: "cut"
    second.take(job)
    agent.tells(second, "new", keep=True)
    assert not second.spool.has_started
    wire.meddle = lambda head: None
    second.keep()
    assert second.texts(job) == make_plane(wired_bucket).texts(job) == ["kept", "not kept", "new"]


def test_restarted_control_plane_continues_a_log_from_its_own_disk(make_plane, shared, job):
    first, agent = make_plane(shared), Agent()
    first.take(job)
    for number in range(3):
        agent.tells(first, f"{number}", "and more")
        if number == 0:
            first.keep()
    file = first.spool.lines.file(0)
    *whole, _ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole) + b'{"cut')  # in the middle of the last report
    agent.prints("3")
    again = make_plane(shared, first.home)
    again.take(job)
    agent.reports_to(again)
    again.keep()
    assert again.texts(job) == make_plane(shared).texts(job) == ["0", "and more", "1", "and more", "2", "and more", "3"]


def test_log_of_a_finished_job_is_read_from_the_store_as_one_part(make_plane, bucket, job, to_state):
    mine, other, agent = make_plane(bucket), make_plane(bucket), Agent()
    mine.take(job)
    for number in range(5):
        agent.tells(mine, f"{number}", keep=True)
    assert not other.archiver.is_complete(job) and mine.archiver.is_complete(job)
    mine.texts(job)
    to_state(*RUNNING, JobState.SUCCEEDED)
    mine.finish(job)
    assert mine.texts(job) == other.texts(job) == [f"{number}" for number in range(5)]
    assert other.archiver.is_complete(job) and mine.archiver.is_complete(job)
    assert mine.files(job) == [] and not (mine.home / "jobs" / job).exists()
    assert parts_of(bucket, job) == ["000000001-000000006-000001-end.part"]


def test_log_reader_misses_nothing_when_the_job_ends_meanwhile(make_plane, shared, job, to_state):
    mine, agent = make_plane(shared), Agent()
    mine.take(job)
    agent.tells(mine, "all", keep=True)
    source = mine.archiver.source(job)
    to_state(*RUNNING, JobState.SUCCEEDED)
    mine.finish(job)
    assert source.ranks() == [0]
    assert b'"all"' in source.read(0, 0, 1000).content


@pytest.mark.parametrize("process", ["the same", "the next"])
def test_last_lines_of_a_job_are_uploaded_later_even_by_the_next_process(
    make_plane, wired_bucket, wire, job, to_state, process
):
    first, other, agent = make_plane(wired_bucket), make_plane(wired_bucket), Agent()
    first.take(job)
    first.keep()
    agent.tells(first, "last")
    wire.meddle = lambda head: "cut"
    to_state(*RUNNING, JobState.SUCCEEDED)
    first.finish(job)
    assert first.texts(job) == ["last"]
    later = first if process == "the same" else make_plane(wired_bucket, first.home)
    wire.meddle = lambda head: None
    later.go_on(lambda: not (first.home / "jobs" / job).exists())
    assert other.texts(job) == later.texts(job) == ["last"] and other.archiver.is_complete(job)


def test_local_log_files_are_removed_when_another_service_finishes_the_job(make_plane, shared, job, to_state):
    first, second, agent = make_plane(shared), make_plane(shared), Agent()
    first.take(job)
    agent.tells(first, "one")
    second.take(job)
    first.archiver.lose(job, first.spool)
    agent.reports_to(second)
    second.keep()
    assert first.texts(job) == ["one"] and first.files(job)
    to_state(*RUNNING, JobState.SUCCEEDED)
    second.finish(job)
    first.go_on(lambda: not first.files(job))
    assert first.texts(job) == ["one"]


def test_log_of_a_retried_job_is_continued(make_plane, shared, job, to_state):
    first, second, agent = make_plane(shared), make_plane(shared), Agent()
    first.take(job)
    agent.tells(first, "first try")
    to_state(*RUNNING, JobState.PAUSING, JobState.PAUSED)
    first.finish(job)
    second.take(job)
    again = Agent()
    again.tells(second, "second try", generation=2, keep=True)
    assert first.texts(job) == second.texts(job) == ["first try", "second try"]
    assert not first.archiver.is_complete(job)


def test_small_log_parts_are_merged_while_the_job_runs_and_is_read(make_plane, bucket, job, monkeypatch):
    monkeypatch.setattr(parts, "SMALL_PARTS", 4)
    monkeypatch.setattr(archiver, "SMALL_PARTS", 4)
    mine, other, agents = make_plane(bucket), make_plane(bucket), [Agent(0), Agent(1)]
    mine.take(job)
    known = []
    for number in range(11):
        agents[number % 2].tells(mine, f"{number}", at=number, keep=True)
        known.append(f"{number}")
        source = other.archiver.source(job, fresh=False)  # it may know parts that are not there any more
        assert b'"0"' in source.read(0, 0, 100_000).content
        assert other.texts(job) == known
    assert len(parts_of(bucket, job)) < 6


def test_large_local_log_files_are_truncated_once_stored(make_plane, shared, job, monkeypatch):
    monkeypatch.setattr("manta.service.log_archive.spool.SHRINK_BYTES", 2000)
    mine, agent, texts = make_plane(shared), Agent(), []
    mine.take(job)
    for number in range(35):
        agent.prints(f"{number}" * 20)
        texts.append(f"{number}" * 20)
        agent.reports_to(mine)
        mine.keep()
        assert mine.spool.lines.file(0).stat().st_size < 3000
    assert mine.texts(job) == make_plane(shared).texts(job) == texts
    assert mine.spool.lines.file(0).stat().st_size, "the next one's file begins with what is kept"
    again = make_plane(shared, mine.home)
    again.take(job)
    again.keep()
    for number in range(30):
        agent.prints(f"again {number} " * 20)
        texts.append(f"again {number} " * 20)
        agent.reports_to(again)
        newest = again.spool.read(0, again.spool.end(0) - 1, 1)
        assert newest is not None and newest.content == b"\n", "also where the file begins anew, before that is kept"
        again.keep()
    assert again.texts(job) == make_plane(shared).texts(job) == texts


def test_lines_written_before_remote_logs_were_set_up_are_read_and_stored(make_plane, shared, job):
    mine, agent = make_plane(shared), Agent()
    folder = mine.home / "jobs" / job / "logs"
    folder.mkdir(parents=True)
    (folder / "rank-00000.jsonl").write_text('{"time": 1.0, "generation": 1, "text": "old"}\n')
    assert mine.texts(job) == ["old"]
    mine.take(job)
    agent.tells(mine, "new", generation=2, keep=True)
    assert mine.texts(job) == make_plane(shared).texts(job) == ["old", "new"]


@pytest.mark.parametrize("be", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("since", ["the beginning", "it printed"])
def test_pipe_or_folder_in_the_place_of_a_log_does_not_block_other_ranks(make_plane, shared, job, be, since):
    mine, other, damaged = make_plane(shared), Agent(0), Agent(1)
    file = mine.home / "jobs" / job / "logs" / "rank-00001.jsonl"
    file.parent.mkdir(parents=True)
    if since == "it printed":
        mine.take(job)
        damaged.tells(mine, "gone")
        file.unlink()
    be(file)
    mine.take(job)
    other.tells(mine, "first", keep=True)
    assert mine.texts(job, rank=0) == make_plane(shared).texts(job) == ["first"]
    for read in (lambda: mine.read(job), lambda: read_tail(mine.archiver.source(job), 1)):
        with pytest.raises(LogsUnavailable, match="not a regular file"):
            read()
    damaged.tells(mine, "second", keep=True)
    assert mine.texts(job, rank=1)[-1:] == make_plane(shared).texts(job, rank=1)[-1:] == ["second"]


def test_report_of_very_many_lines_is_kept_whole(make_plane, shared, job, monkeypatch):
    monkeypatch.setattr("manta.service.log_archive.spool.CHUNK_BYTES", 64)
    monkeypatch.setattr(archiver, "PART_BYTES", 64)
    mine, agent = make_plane(shared), Agent()
    mine.take(job)
    texts = [f"line {number}" for number in range(3000)]
    agent.prints(*texts)
    agent.tells(mine, "next", keep=True)
    assert make_plane(shared).texts(job) == [*texts, "next"]


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 100))])
def test_kept_log_has_every_line_once_and_in_order_despite_any_failures(make_plane, shared, job, seed, monkeypatch):
    """Control planes die at any moment, with their disks or without, stand still and go on, and the store fails."""
    monkeypatch.setattr(archiver, "SMALL_PARTS", 5)
    monkeypatch.setattr(archiver, "PART_BYTES", 300)
    monkeypatch.setattr("manta.service.log_archive.spool.CHUNK_BYTES", 100)
    monkeypatch.setattr("manta.service.log_archive.spool.SHRINK_BYTES", 2000)
    drawn, place, agents = random.Random(seed), shared, [Agent(0), Agent(1)]
    planes = [make_plane(place), make_plane(place)]
    owner, printed = planes[0], {0: [], 1: []}
    owner.take(job)
    whole = type(files_of(place)).write_atomically

    def fails(files, file, content):
        if drawn.random() < 0.5:
            whole(files, file, content)  # it is there, and nobody is told
        raise OSError("the store is away")

    for number in range(120):
        what = drawn.choice(["print", "print", "print", "keep", "keep", "fail", "takeover", "restart", "lose disk"])
        if what == "print":
            agent = drawn.choice(agents)
            texts = [f"{number} {part}" for part in range(drawn.randint(1, 4))]
            agent.prints(*texts, at=number)
            printed[agent.rank] += texts
            agent.reports_to(owner)
        elif what in ("keep", "fail"):
            with monkeypatch.context() as patch:
                if what == "fail":
                    patch.setattr(type(files_of(place)), "write_atomically", fails)
                owner.keep()
        else:
            if what == "takeover":
                owner = next(plane for plane in planes if plane is not owner)
            else:
                index = planes.index(owner)
                owner = planes[index] = make_plane(place, owner.home if what == "restart" else None)
            owner.take(job)
            for agent in agents:
                agent.reports_to(owner)
    owner.keep()
    for plane in (owner, make_plane(place)):
        for rank, texts in printed.items():
            assert plane.texts(job, rank=rank, limit=drawn.randint(1, 50)) == texts
