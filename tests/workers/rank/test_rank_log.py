"""What trainers print becomes lines of JSON, whatever they print and whatever the disk says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from manta.workers.rank import rank_log
from manta.workers.rank.rank_log import LINE_CHARACTERS, TAIL_LINES, LineSplitter, RankLog


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rank_log_lines_have_time_rank_generation_and_stream_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_log.time, "time", lambda: 7.5)
    log = RankLog(tmp_path / "logs" / "rank.jsonl", 3)
    log.write(2, "stderr", ["ä", "why"])
    stamp = {"time": 7.5, "rank": 3, "generation": 2, "stream": "stderr"}
    assert written(tmp_path / "logs" / "rank.jsonl") == [{**stamp, "text": "ä"}, {**stamp, "text": "why"}]


def test_rank_log_is_continued_by_the_next_generation(tmp_path):
    for generation in (1, 2):
        log = RankLog(tmp_path / "rank.jsonl", 3)
        log.write(generation, "stdout", ["here"])
    assert [line["generation"] for line in written(tmp_path / "rank.jsonl")] == [1, 2]


def test_rank_log_that_could_not_be_written_takes_later_lines(tmp_path):
    folder = tmp_path / "logs"
    folder.write_text("in its way")
    log = RankLog(folder / "rank.jsonl", 3)
    log.write(1, "stdout", ["lost"])
    folder.unlink()
    log.write(1, "stdout", ["kept"])
    assert [line["text"] for line in written(folder / "rank.jsonl")] == ["kept"]


@pytest.mark.parametrize("be", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_pipe_folder_or_link_in_the_place_of_a_rank_log_is_replaced(tmp_path, be):
    be(tmp_path / "rank.jsonl")
    log = RankLog(tmp_path / "rank.jsonl", 3)
    log.write(1, "stdout", ["kept"])
    assert [line["text"] for line in written(tmp_path / "rank.jsonl")] == ["kept"]


@pytest.mark.parametrize("move", [lambda path: path.rename(path.with_suffix(".1")), Path.unlink])
def test_rank_log_is_recreated_after_a_rotation_or_removal(tmp_path, move):
    log, path = RankLog(tmp_path / "rank.jsonl", 3), tmp_path / "rank.jsonl"
    log.write(1, "stdout", ["before"])
    move(path)
    log.write(1, "stdout", ["after"])
    assert [line["text"] for line in written(path)] == ["after"]


def test_link_in_the_place_of_a_log_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("of others")
    (tmp_path / "rank.jsonl").symlink_to(tmp_path / "other")
    RankLog(tmp_path / "rank.jsonl", 3).write(1, "stdout", ["kept"])
    assert (tmp_path / "other").read_text() == "of others"
    assert [line["text"] for line in written(tmp_path / "rank.jsonl")] == ["kept"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_line_splitter_gives_the_same_lines_for_any_byte_pieces(size):
    content, splitter, lines = b"one\r\n\ntwo \xff\nthree", LineSplitter(), []
    for at in range(0, len(content), size):
        lines += splitter.feed(content[at : at + size])
    assert lines == ["one", "", "two \ufffd"]
    assert splitter.feed(b"") == ["three"]
    assert splitter.feed(b"") == []


def test_line_splitter_cuts_an_endless_line_into_pieces():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (LINE_CHARACTERS - 1)) == []
    assert splitter.feed(b"x") == ["x" * LINE_CHARACTERS]
    assert splitter.feed(b"y\n") == ["y"]
    assert splitter.feed(b"z" * (2 * LINE_CHARACTERS + 1) + b"\n") == [
        "z" * LINE_CHARACTERS,
        "z" * LINE_CHARACTERS,
        "z",
    ]


def test_line_splitter_tail_has_the_last_lines():
    splitter = LineSplitter()
    splitter.feed("".join(f"{number}\n" for number in range(TAIL_LINES + 5)).encode())
    assert list(splitter.tail) == [str(number) for number in range(5, TAIL_LINES + 5)]
