"""Log pages: every line once, merged by time, from files that are still being written."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manta.service.logs.pages import LogCursors, LogFiles, LogsUnavailable, log_file, log_folder, read_page
from manta.service.logs.tail import read_tail
from manta.service.store.errors import ForeignCursor, InvalidCursor

CURSORS = LogCursors("job_000000000001")


def entry(time, text, rank=0, stream="stdout"):
    return json.dumps({"time": time, "rank": rank, "generation": 1, "stream": stream, "text": text})


def write(folder, rank, *lines, end="\n"):
    folder.mkdir(exist_ok=True)
    with log_file(folder, rank).open("a") as file:
        file.write("\n".join(lines) + end)


def read_all(folder, **options):
    texts, position = [], {}
    while True:
        page = read_page(LogFiles(folder), CURSORS.decode(CURSORS.encode(position)), **options)
        texts += [line.text for line in page.lines]
        assert page.position != position or not page.more, "no progress"
        position = page.position
        if not page.more:
            return texts


def test_a_job_that_printed_nothing_has_an_empty_page(tmp_path):
    page = read_page(LogFiles(tmp_path / "nowhere"), {})
    assert (page.lines, page.more) == ([], False)
    assert read_page(LogFiles(tmp_path), {}, rank=3).lines == []


@pytest.mark.parametrize("be", [Path.mkdir, os.mkfifo])
def test_log_that_cannot_be_read_is_not_taken_for_an_empty_one_nor_waited_for(tmp_path, be):
    be(log_file(tmp_path, 0))
    not_there, source = LogFiles(tmp_path / "nothing"), LogFiles(tmp_path)
    assert (not_there.ranks(), not_there.read(0, 0, 9).content, not_there.end(0), source.ranks()) == ([], b"", 0, [0])
    for read in (read_page, lambda source, _: read_tail(source, 1)):
        with pytest.raises(LogsUnavailable, match=r"nothing of it is lost: .*not a regular file"):
            read(source, {})
    with pytest.raises(LogsUnavailable):
        LogFiles(tmp_path / ("x" * 300)).ranks()


def test_log_page_of_one_rank_has_its_lines_only(tmp_path):
    write(tmp_path, 0, entry(1, "a"), entry(3, "c"))
    write(tmp_path, 1, entry(2, "b", 1, "stderr"))
    assert read_all(tmp_path, rank=0) == ["a", "c"]
    line = read_page(LogFiles(tmp_path), {}, rank=1).lines[0]
    assert (line.rank, line.stream, line.generation, line.time) == (1, "stderr", 1, 2.0)


def test_log_page_merges_ranks_by_time(tmp_path):
    write(tmp_path, 0, entry(1, "a"), entry(3, "c"))
    write(tmp_path, 1, entry(2, "b"), entry(4, "d"))
    assert read_all(tmp_path) == ["a", "b", "c", "d"]
    assert read_all(tmp_path, limit=1) == ["a", "b", "c", "d"]


def test_log_page_omits_a_partial_line_until_it_is_complete(tmp_path):
    whole = entry(2, "second")
    write(tmp_path, 0, entry(1, "first"))
    write(tmp_path, 0, whole[:10], end="")
    page = read_page(LogFiles(tmp_path), {})
    assert [line.text for line in page.lines] == ["first"]
    write(tmp_path, 0, whole[10:])
    assert [line.text for line in read_page(LogFiles(tmp_path), page.position).lines] == ["second"]


def test_log_page_skips_lines_in_another_format(tmp_path):
    odd = ("garbage", "[]", "[" * 100_000, "\x00", '{"text": "no time"}')
    times = ("x", "NaN", "1e999", "-1", "253402300800", "Infinity")
    write(tmp_path, 0, *odd, *(f'{{"time": {time}, "text": ""}}' for time in times), entry(1, "good"))
    write(tmp_path, 0, '{"time": 1, "generation": 1e999, "text": ""}')
    assert read_all(tmp_path) == ["good"]


def test_log_page_skips_an_oversized_line(tmp_path):
    write(tmp_path, 0, entry(1, "x" * 300_000), entry(2, "after"))
    write(tmp_path, 1, entry(1.5, "other"))
    assert read_all(tmp_path, max_bytes=1) == ["other", "after"]


def test_log_page_keeps_the_order_after_an_oversized_line(tmp_path):
    write(tmp_path, 0, entry(1, "x" * 300_000), *(entry(n, f"{n}") for n in (2, 4)))
    write(tmp_path, 1, *(entry(n, f"{n}") for n in (3, 5)))
    assert read_page(LogFiles(tmp_path), {}, max_bytes=1).lines == [], "what the first has to say comes first"
    assert read_all(tmp_path, max_bytes=1) == ["2", "3", "4", "5"]


def test_log_page_reads_at_most_its_byte_limit(tmp_path):
    write(tmp_path, 0, *(entry(n, "x" * 1000) for n in range(1000)))
    page = read_page(LogFiles(tmp_path), {}, limit=10_000, max_bytes=100_000)
    assert 50 < len(page.lines) < 100
    assert page.more


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    times=st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=4),
    limit=st.integers(1, 40),
)
def test_log_pages_have_every_line_once_and_each_rank_in_order(tmp_path_factory, times, limit):
    folder = tmp_path_factory.mktemp("logs")
    for rank, own in enumerate(times):
        if own:
            write(folder, rank, *(entry(time, f"{rank}:{n}") for n, time in enumerate(own)))
    texts = read_all(folder, limit=limit)
    for rank, own in enumerate(times):
        assert [text for text in texts if text.startswith(f"{rank}:")] == [f"{rank}:{n}" for n in range(len(own))]


def test_sorted_ranks_read_in_small_chunks_come_out_sorted(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, *(entry(n * (rank + 1), f"{n * (rank + 1)} " + "x" * 500) for n in range(400)))
    times = [int(text.split()[0]) for text in read_all(tmp_path, max_bytes=1)]
    assert len(times) == 1200
    assert times == sorted(times)


@pytest.mark.parametrize("cursor", ["?", "AAAA", "MDotMQ", "MA"])
def test_log_cursor_that_is_malformed_is_refused(cursor):
    with pytest.raises(InvalidCursor):
        CURSORS.decode(cursor)


@pytest.mark.parametrize("job_id, rank", [("job_000000000002", None), ("job_000000000001", 0)])
def test_log_cursor_of_another_job_or_rank_is_refused(job_id, rank):
    with pytest.raises(ForeignCursor, match="another list"):
        CURSORS.decode(LogCursors(job_id, rank).encode({0: 5}))


@pytest.mark.parametrize("job_id", ["../..", "job_../../etc/pas", "", "/etc"])
def test_log_folder_refuses_anything_but_a_job_id(tmp_path, job_id):
    with pytest.raises(ValueError, match="not a job id"):
        log_folder(tmp_path, job_id)


def test_log_line_without_generation_or_stream_gets_defaults(tmp_path):
    write(tmp_path, 0, '{"time": 1, "text": "bare"}')
    (line,) = read_page(LogFiles(tmp_path), {}).lines
    assert (line.text, line.generation, line.stream) == ("bare", 0, "stdout")
