"""The log of a job: pages, filters, the last lines."""

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manta.service.logs import tail as log_tail
from manta.service.logs.filters import InvalidPattern, LogFilter, level_of
from manta.service.logs.pages import LogBytes, LogCursors, LogFiles, LogsUnavailable, log_file, log_folder, read_page
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


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("WARNING:root:disk is nearly full", "warning"), ("2026-01-01 10:00 ERROR trainer: no", "error"),
        ("[W1126 02:22:00.5 socket.cpp:752] [c10d] The client socket", "warning"), ("[rank0]:[E1126 02:22 x", "error"),
        ("ValueError: bad", "error"), ("torch.cuda.OutOfMemoryError: no", "error"), ("UserWarning: old", "warning"),
        ("DEBUG a", "debug"), ("FATAL", "critical"), ("step 5 loss 2.3", None), ("no error here", None), ("", None),
        ("x" * 200 + " ERROR", None), ("  raise ValueError", None), ("INFORMATION", None),
    ],
)  # fmt: skip
def test_log_level_is_read_from_the_line(text, level):
    assert level_of(text) == level


NOTICES = (
    "[W1126 02:22:00.5 socket.cpp:752] [c10d] The client socket has failed",
    "[rank0]:[W1126 02:22:00.5 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called",
    "[Gloo] Rank 0 is connected to 1 peer ranks", "(raylet) it spills",
    "[2026-01-01 10:00:00,123 W 12 34] core_worker.cc:5: slow",
)  # fmt: skip
NOT_NOTICES = ("[E1126 02:22:00.5 socket.cpp:1] [c10d] failed", "[rank 0] W", "[2026-01-01] step", "socket: 5", "")


@pytest.mark.parametrize(("text", "wanted"), [(text, text in NOT_NOTICES) for text in (*NOTICES, *NOT_NOTICES)])
def test_notices_of_libraries_are_distinguished_from_lines_of_the_job(text, wanted):
    assert LogFilter(notices=False).test().wants("stderr", text) == wanted


@pytest.mark.parametrize(
    ("wanted", "stream", "text", "yes"),
    [
        (LogFilter("stderr"), "stderr", "x", True), (LogFilter("stderr"), "stdout", "x", False),
        (LogFilter(search="LoSs"), "stdout", "the loss", True), (LogFilter(search="loss"), "stdout", "los", False),
        (LogFilter(regex="^a+$"), "stdout", "aaa", True), (LogFilter(regex="^a+$"), "stdout", "aab", False),
        (LogFilter(regex="(?i)é+$"), "stdout", "CAFÉÉ", True), (LogFilter(regex="b$"), "stdout", "\ud800b", True),
        (LogFilter(level="warning"), "stdout", "ERROR x", True), (LogFilter(level="error"), "stdout", "WARN x", False),
        (LogFilter(level="debug"), "stdout", "says nothing", False),
        (LogFilter("stderr", "b", "a", "info"), "stderr", "INFO a b", True),
        (LogFilter("stderr", "b", "a", "info"), "stderr", "INFO a c", False),
    ],
)  # fmt: skip
def test_log_filter_conditions_must_all_hold(wanted, stream, text, yes):
    assert wanted.test().wants(stream, text) is yes


@pytest.mark.parametrize(
    ("regex", "why"),
    [("(a", r"missing \): \(a"), (r"(a)\1", "invalid escape"), ("a" * 501, "longer than 500"), ("\ud800", "half"),
     ("(a{100}){100}", "invalid repetition")],
)  # fmt: skip
def test_log_filter_refuses_invalid_or_oversized_patterns(regex, why):
    with pytest.raises(InvalidPattern, match=why):
        LogFilter(regex=regex).test()


def test_log_filter_patterns_take_linear_time():
    assert not LogFilter(regex="(a*)*b|((a+)+)+$z").test().wants("stdout", "a" * 8192)


def test_log_filter_without_conditions_tests_nothing():
    assert LogFilter().test() is None


@pytest.mark.parametrize(
    ("search", "line", "may"),
    [
        ("loss", b'{"text": "no LOSS"}', True), ("loss", b'{"text": "x"}', False), ("a\"b", b'{"text": "x"}', True),
        ("é", b'{"text": "x"}', True), ("a\\b", b"{}", True), (None, b"{}", True),
    ],
)  # fmt: skip
def test_log_filter_byte_check_never_drops_a_matching_line(search, line, may):
    assert LogFilter("stdout", search).test().may_want(line) is may


def write_log(folder, rank, lines, end=""):
    folder.mkdir(exist_ok=True)
    entries = [
        json.dumps({"time": time, "rank": rank, "generation": 1, "stream": "stdout", "text": text}) + "\n"
        for time, text in lines
    ]
    log_file(folder, rank).write_text("".join(entries) + end)


def everything(folder, rank=None, test=None):
    lines, position = [], {}
    while True:
        page = read_page(LogFiles(folder), position, rank, test=test)
        lines, position = lines + page.lines, page.position
        if not page.more:
            return lines


def all_from_the_end(folder, count, wanted):
    lines, until = [], None
    while until is None or any(until.values()):
        tail = read_tail(LogFiles(folder), count, test=wanted.test(), until=until)
        assert tail.earlier != until, "no progress"
        lines, until = tail.lines + lines, tail.earlier
    return lines


@pytest.mark.parametrize("seed", range(6))
def test_log_tail_equals_the_end_of_the_whole_log(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(log_tail, "CHUNK_BYTES", 300)
    rng = random.Random(seed)
    for rank in range(3):
        time, lines = 0.0, []
        for number in range(rng.choice([0, 3, 200])):
            time += rng.choice([0.0, 0.1, 5.0])
            lines.append((time, f"{rank} {number} {'x' * rng.choice([0, 10, 2000])}"))
        write_log(tmp_path, rank, lines, end=rng.choice(["", '{"time": 9999, "text": "half', "no json\n"]))
    for wanted in (LogFilter(), LogFilter(search="7"), LogFilter(search="nowhere")):
        whole = everything(tmp_path, test=wanted.test())
        for count in (1, 2, 17, 1000):
            tail = read_tail(LogFiles(tmp_path), count, test=wanted.test())
            assert tail.lines == whole[-count:]
            assert tail.more is (len(whole) > count) or (tail.more and len(whole) >= count)
            again = read_page(LogFiles(tmp_path), tail.begin, limit=5000, test=wanted.test())
            assert again.lines == tail.lines, "whoever goes on where they begin sees them again, and no others"
            assert read_page(LogFiles(tmp_path), tail.end, test=wanted.test()).lines == []
            assert tail.lines == [] or all_from_the_end(tmp_path, count, wanted) == whole, "part by part"
    one = [line for line in everything(tmp_path) if line.rank == 1]
    assert read_tail(LogFiles(tmp_path), 20, rank=1).lines == one[-20:]


def test_log_tail_keeps_rank_order_for_equal_times(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "CHUNK_BYTES", 300)
    write_log(tmp_path, 0, [(1.0, f"first {number}") for number in range(3)])
    write_log(tmp_path, 1, [(1.0, f"second {number}") for number in range(100)])
    assert read_tail(LogFiles(tmp_path), 5).lines == everything(tmp_path)[-5:]


class Counting(LogFiles):
    """Counts what is read."""

    count = 0

    def read(self, rank, start, size):
        chunk = super().read(rank, start, size)
        self.count += len(chunk.content)
        return chunk


def test_log_tail_reads_little_of_a_long_log(tmp_path):
    write_log(tmp_path, 0, [(float(number), "x" * 100) for number in range(50_000)])
    source = Counting(tmp_path)
    tail = read_tail(source, 100)
    assert [line.time for line in tail.lines] == [float(number) for number in range(49_900, 50_000)]
    assert source.count < 4 * log_tail.CHUNK_BYTES < log_file(tmp_path, 0).stat().st_size / 10
    assert tail.more


def test_log_tail_search_with_few_matches_stops_at_its_byte_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "MAX_BYTES", 200_000)
    write_log(tmp_path, 0, [(float(number), "needle" if number == 5 else "x" * 100) for number in range(20_000)])
    tail = read_tail(LogFiles(tmp_path), 10, test=LogFilter(search="needle").test())
    assert (tail.lines, tail.more) == ([], True)
    assert [line.time for line in all_from_the_end(tmp_path, 10, LogFilter(search="needle"))] == [5.0], "and goes on"


def test_log_tail_of_a_truncated_log_has_the_remaining_lines(tmp_path):
    write_log(tmp_path, 0, [(float(number), str(number)) for number in range(10)])
    content = log_file(tmp_path, 0).read_bytes()
    half = content.index(b"\n", len(content) // 2) + 1

    class Lost(LogFiles):
        def read(self, rank, start, size):
            begin = max(start, half)
            return LogBytes(begin, content[begin : start + size], start + size < len(content))

    tail = read_tail(Lost(tmp_path), 100)
    assert [line.text for line in tail.lines] == [str(number) for number in range(10 - content[half:].count(b"\n"), 10)]
    assert not tail.more


def test_job_that_printed_nothing_has_no_tail(tmp_path):
    for rank in (None, 4):
        tail = read_tail(LogFiles(tmp_path / "nowhere"), 5, rank)
        assert (tail.lines, tail.more) == ([], False)


@pytest.mark.parametrize("end", ["", "\n"])
def test_log_tail_reads_a_line_longer_than_its_first_chunk(tmp_path, monkeypatch, end):
    monkeypatch.setattr(log_tail, "CHUNK_BYTES", 100)
    write_log(tmp_path, 0, [(1.0, "a" * 1000), (2.0, "b" * 1000)], end)
    assert [line.text[0] for line in read_tail(LogFiles(tmp_path), 1).lines] == ["b"]
