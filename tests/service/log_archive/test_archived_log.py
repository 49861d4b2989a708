"""Archived logs: parts, their names, marks of lines, readers."""

import io
import json
import threading
import time

import pytest

from manta.service.log_archive import archived_log, parts
from manta.service.log_archive.archived_log import ArchivedLog, Blocks
from manta.service.log_archive.parts import (
    NoPart,
    PartName,
    PartWriter,
    Segment,
    counting,
    decode,
    encode,
    end_of,
    end_of_reports,
    is_gapless,
    last_mark,
    lines_backwards,
)
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


def line(sequence, left=0, generation=1, text="x"):
    more = {"left": left} if left else {}
    return json.dumps({"generation": generation, "sequence": sequence, **more, "text": text}).encode() + b"\n"


def test_log_lines_are_read_backwards_for_any_block_size(monkeypatch):
    lines = [line(number, text="y" * number) for number in range(40)]
    content = b"".join(lines) + b"cut"
    for size in (1, 7, 64, 1000, 100_000):
        monkeypatch.setattr(parts, "BLOCK_BYTES", size)
        placed = list(lines_backwards(io.BytesIO(content), len(content)))
        assert [each for _, each in placed] == lines[::-1]
        assert all(content[at:].startswith(each) for at, each in placed)


def test_incomplete_report_at_the_end_of_a_log_is_not_counted():
    whole, begun = line(1) + line(2, left=1) + line(2), line(3, left=2) + line(3, left=1) + b'{"gen'
    content = io.BytesIO(whole + begun)
    assert end_of_reports(content, len(whole + begun)) == len(whole)
    assert last_mark(content, len(whole)) == (1, 2)
    assert (end_of_reports(io.BytesIO(), 0), last_mark(io.BytesIO(), 0)) == (0, (0, 0))


def test_end_of_the_uploaded_lines_is_found_by_report_number():
    parts = [line(4), b"no line\n", line(9), line(1, generation=2)]
    content, size = io.BytesIO(b"".join(parts)), sum(map(len, parts))
    upto = lambda mark: end_of(content, size, mark)  # noqa: E731
    assert upto((2, 1)) == upto((7, 0)) == size
    assert upto((1, 9)) == upto((1, 100)) == size - len(parts[-1])
    assert upto((1, 8)) == len(parts[0])
    assert upto((1, 3)) == 0


def names(*parts):
    return [str(PartName(*part)) for part in parts]


def test_log_part_name_is_parsed_and_other_names_are_ignored():
    part = PartName(3, 17, 4, True)
    assert PartName.parse(str(part)) == part and str(part) == "000000003-000000017-000004-end.part"
    assert counting([".000000001-000000001-000001.part", "rank-00000.jsonl", "x"]) == []


@pytest.mark.parametrize(("parts", "count"), [
    (((2, 2, 9), (1, 1, 1), (2, 2, 1), (3, 3, 9)), [(1, 1, 1), (2, 2, 9), (3, 3, 9)]),  # of two the later service's
    (((1, 1, 1), (2, 2, 1), (2, 2, 9), (3, 3, 9)), [(1, 1, 1), (2, 2, 9), (3, 3, 9)]),
    (((1, 1, 1), (1, 3, 2), (2, 2, 1), (3, 3, 1), (4, 4, 2)), [(1, 3, 2), (4, 4, 2)]),  # a merged one replaces others
])  # fmt: skip
def test_log_is_made_of_merged_parts_and_of_the_latest_of_each_number(parts, count):
    assert [(part.first, part.last, part.stamp) for part in counting(names(*parts))] == count


def test_gap_in_log_part_numbers_is_detected():
    assert is_gapless(counting(names((1, 3, 1), (4, 4, 1)))) and is_gapless([])
    assert not is_gapless(counting(names((1, 1, 1), (3, 3, 1))))
    assert not is_gapless(counting(names((2, 2, 1))))


def test_log_part_keeps_the_bytes_of_each_rank():
    chunks = {12: (Segment(0, 3, (1, 4)), b"ab\n"), 2: (Segment(7, 7, (1, 2)), b""), 0: (Segment(5, 7, (2, 1)), b"c\n")}
    assert decode(encode(chunks)) == chunks


CUT = encode({0: (Segment(5, 7, (2, 1)), b"c\n")})[:-1]


@pytest.mark.parametrize("content", [b"", b"no JSON\n", b"[]\n", b'{"ranks": {"0": [1]}}\n', CUT])
def test_invalid_log_part_is_refused(content):
    with pytest.raises(NoPart):
        decode(content)
