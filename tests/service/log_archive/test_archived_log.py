"""Reading a log waits for no place that does not answer, and misses nothing that was there when it was asked for."""

import threading
import time

import pytest

from manta.service.log_archive import archived_log
from manta.service.log_archive.archived_log import ArchivedLog, Blocks
from manta.service.log_archive.parts import PartWriter, Segment
from manta.service.logs.pages import LogsUnavailable
from manta.workers.storage.files import LocalFiles


@pytest.fixture
def written(tmp_path):
    """A writer of parts that has written one."""
    writer = PartWriter(tmp_path)
    writer.begin(1)
    writer.write({0: (Segment(0, 3, (1, 1)), b"ab\n")})
    return writer


def test_log_store_that_hangs_is_waited_for_once(written, tmp_path, monkeypatch):
    answers, names = threading.Event(), LocalFiles.names
    monkeypatch.setattr(LocalFiles, "names", lambda files, folder: answers.wait() and names(files, folder))
    monkeypatch.setattr(archived_log, "ANSWER_SECONDS", 0.05)
    log = ArchivedLog(tmp_path, Blocks())
    for _ in range(2):
        with pytest.raises(LogsUnavailable, match="no answer"):
            log.refresh()
    assert log._requested_at < time.monotonic() - 0.05
    monkeypatch.setattr(archived_log, "ANSWER_SECONDS", 0.0)
    with pytest.raises(LogsUnavailable, match="no answer"):
        log.refresh()
    answers.set()
    monkeypatch.setattr(archived_log, "ANSWER_SECONDS", 60.0)
    assert log.refresh().read(0, 0, 10).content == b"ab\n"


def test_kept_log_listing_is_cached_unless_a_fresh_one_is_wanted(written, tmp_path):
    log = ArchivedLog(tmp_path, Blocks()).refresh()
    written.write({0: (Segment(3, 5, (1, 2)), b"c\n")})
    assert log.refresh(1000.0).read(0, 0, 10).content == b"ab\n"
    assert log.refresh().read(0, 0, 10).content == b"ab\nc\n"


def test_ranges_of_ranks_with_more_than_a_block_in_several_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(archived_log, "BLOCK_BYTES", 32)
    writer, texts = PartWriter(tmp_path), {0: b"", 3: b""}
    writer.begin(1)
    for number in range(9):
        chunks = {}
        for rank in (0, 3)[: 1 + number % 2]:
            new = b"%d of %d\n" % (number, rank) * (number + rank)
            start = len(texts[rank])
            texts[rank] += new
            chunks[rank] = Segment(start, len(texts[rank]), (1, number + 1)), new
        writer.write(chunks)
    log = ArchivedLog(tmp_path, Blocks(max_blocks=3)).refresh()
    assert log.ranks() == [0, 3]
    for rank, text in texts.items():
        for start in range(0, len(text) + 5, 13):
            for size in (1, 40, 10_000):
                chunk = log.read(rank, start, size)
                assert (chunk.start, chunk.content) == (start, text[start : start + size])
                assert chunk.more is (start + size < len(text))


def test_damaged_log_part_is_refused(written, tmp_path):
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LogsUnavailable, match="too short"):
        ArchivedLog(tmp_path, Blocks()).refresh().read(0, 0, 10)


def test_log_store_that_stops_answering_during_a_read_blocks_no_other_reader(written, tmp_path, monkeypatch):
    answers, reader = threading.Event(), LocalFiles.reader
    monkeypatch.setattr(LocalFiles, "reader", lambda files, part: answers.wait(60) and reader(files, part))
    monkeypatch.setattr(archived_log, "READ_SECONDS", 0.05)
    log = ArchivedLog(tmp_path, Blocks()).refresh()
    for seconds in (0.05, 60.0):  # the second reader does not wait
        monkeypatch.setattr(archived_log, "READ_SECONDS", seconds)
        with pytest.raises(LogsUnavailable, match="no answer"):
            log.read(0, 0, 10)
    answers.set()
    log._unanswered.exception(60)
    assert log.read(0, 0, 10).content == b"ab\n"


def test_kept_log_blocks_in_memory_are_read_without_threads_or_storage(written, tmp_path, monkeypatch):
    threads, answers, begin, reader = [], threading.Event(), archived_log.in_daemon_thread, LocalFiles.reader
    monkeypatch.setattr(archived_log, "in_daemon_thread", lambda *work: threads.append(1) or begin(*work))
    log = ArchivedLog(tmp_path, Blocks()).refresh()
    assert log.read(0, 0, 10).content == b"ab\n"
    assert len(threads) == 2, "one for the list of parts, and one for the only block"
    written.write({0: (Segment(3, 5, (1, 2)), b"c\n")})
    log.refresh()
    monkeypatch.setattr(LocalFiles, "reader", lambda files, part: answers.wait(60) and reader(files, part))
    monkeypatch.setattr(archived_log, "READ_SECONDS", 0.05)
    with pytest.raises(LogsUnavailable, match="no answer"):
        log.end(0)
    del log._parts[1:], threads[:]
    assert (log.ranks(), log.end(0), log.read(0, 0, 10).content, threads) == ([0], 3, b"ab\n", [])
    answers.set()
