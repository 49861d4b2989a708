"""The newest lines, from the end: the same ones as of whoever reads everything, from a small part of it."""

import json
import random

import pytest

from manta.service.logs import tail as log_tail
from manta.service.logs.filters import LogFilter
from manta.service.logs.pages import LogBytes, LogFiles, log_file, read_page
from manta.service.logs.tail import read_tail


def write(folder, rank, lines, end=""):
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
        write(tmp_path, rank, lines, end=rng.choice(["", '{"time": 9999, "text": "half', "no json\n"]))
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
    write(tmp_path, 0, [(1.0, f"first {number}") for number in range(3)])
    write(tmp_path, 1, [(1.0, f"second {number}") for number in range(100)])
    assert read_tail(LogFiles(tmp_path), 5).lines == everything(tmp_path)[-5:]


class Counting(LogFiles):
    """Counts what is read."""

    count = 0

    def read(self, rank, start, size):
        chunk = super().read(rank, start, size)
        self.count += len(chunk.content)
        return chunk


def test_log_tail_reads_little_of_a_long_log(tmp_path):
    write(tmp_path, 0, [(float(number), "x" * 100) for number in range(50_000)])
    source = Counting(tmp_path)
    tail = read_tail(source, 100)
    assert [line.time for line in tail.lines] == [float(number) for number in range(49_900, 50_000)]
    assert source.count < 4 * log_tail.CHUNK_BYTES < log_file(tmp_path, 0).stat().st_size / 10
    assert tail.more


def test_log_tail_search_with_few_matches_stops_at_its_byte_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "MAX_BYTES", 200_000)
    write(tmp_path, 0, [(float(number), "needle" if number == 5 else "x" * 100) for number in range(20_000)])
    tail = read_tail(LogFiles(tmp_path), 10, test=LogFilter(search="needle").test())
    assert (tail.lines, tail.more) == ([], True)
    assert [line.time for line in all_from_the_end(tmp_path, 10, LogFilter(search="needle"))] == [5.0], "and goes on"


def test_log_tail_of_a_truncated_log_has_the_remaining_lines(tmp_path):
    write(tmp_path, 0, [(float(number), str(number)) for number in range(10)])
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
    write(tmp_path, 0, [(1.0, "a" * 1000), (2.0, "b" * 1000)], end)
    assert [line.text[0] for line in read_tail(LogFiles(tmp_path), 1).lines] == ["b"]
