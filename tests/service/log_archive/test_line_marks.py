"""The end of a log file says which reports are in it, however large it is."""

import io
import json

from manta.service.log_archive import parts
from manta.service.log_archive.parts import end_of, end_of_reports, last_mark, lines_backwards


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
