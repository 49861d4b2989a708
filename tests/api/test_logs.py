"""GET /v1/jobs/{id}/logs: from the end, filtered, and live in the same way."""

import itertools
import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from manta.api import views
from manta.api.routes import logs
from manta.service.logs.pages import LogsInHome, LogsUnavailable, log_file, log_folder
from manta.service.store import jobs
from tests.api.support.problems import problem_of
from tests.api.test_sse_server import read_stream

LINES = ("step 1 loss 2.5", "WARNING: slow", "step 2 loss 2.25", "ValueError: bad", "step 3 loss 2.0")


@pytest.fixture
def job(service):
    """A job with two ranks, of which one printed LINES and the other errors."""
    job_id = service.submit()["id"]
    add(service, job_id, 0, *LINES)
    add(service, job_id, 1, "ERROR of the other", stream="stderr", begin=10.5)
    return job_id


def add(service, job, rank, *texts, stream="stdout", begin=10.0):
    folder = log_folder(service.control.home, job)
    folder.mkdir(parents=True, exist_ok=True)
    with log_file(folder, rank).open("a") as file:
        for number, text in enumerate(texts):
            line = {"time": begin + number, "rank": rank, "generation": 1, "stream": stream, "text": text}
            file.write(json.dumps(line) + "\n")


def asked(service, job, **parameters):
    answer = service.http.get(f"/v1/jobs/{job}/logs", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(page):
    return [line["text"] for line in page["items"]]


def test_log_tail_is_sorted_by_time_and_says_if_there_are_earlier_lines(service, job):
    page = asked(service, job, tail=2)
    assert (texts(page), page["earlier"], page["next_cursor"]) == (list(LINES[3:]), True, None)
    assert texts(asked(service, job, cursor=page["resume_cursor"])) == []
    add(service, job, 1, "later", begin=99.0)
    assert texts(asked(service, job, cursor=page["resume_cursor"])) == ["later"]
    page = asked(service, job, tail=100)
    assert (len(page["items"]), page["earlier"]) == (7, False)
    assert texts(asked(service, job, tail=1, rank=0)) == [LINES[-1]]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"stream": "stderr"}, ["ERROR of the other"]),
        ({"search": "LOSS 2.2"}, ["step 2 loss 2.25"]),
        ({"regex": r"^step \d loss 2\.\d$"}, [LINES[0], LINES[4]]),
        ({"level": "warning"}, ["ERROR of the other", LINES[1], LINES[3]]),
        ({"level": "error", "rank": 0}, [LINES[3]]),
        ({"search": "step", "regex": "3|1", "stream": "stdout"}, [LINES[0], LINES[4]]),
        ({"level": "critical"}, []),
    ],
)
def test_log_filters_return_exactly_the_matching_lines(service, job, parameters, expected):
    assert texts(asked(service, job, **parameters)) == expected
    assert texts(asked(service, job, **parameters, tail=50)) == expected
    assert texts(asked(service, job, **parameters, tail=1)) == expected[-1:]
    first = asked(service, job, **parameters, limit=1)
    rest = asked(service, job, **parameters, cursor=first["resume_cursor"])
    assert texts(first) + texts(rest) == expected
    service.move(job, "CANCELLED")
    query = "&".join(f"{name}={value}" for name, value in parameters.items()).replace("\\", "%5C").replace("+", "%2B")
    entries, _ = read_stream(service, f"/v1/jobs/{job}/logs?{query}")
    assert [line["text"] for _, line in entries] == expected


def test_log_lines_carry_their_level(service, job):
    levels = {line["text"]: line["level"] for line in asked(service, job)["items"]}
    assert (levels[LINES[0]], levels[LINES[1]], levels[LINES[3]]) == (None, "warning", "error")


def test_log_stream_starts_at_its_tail_and_resumes_after_any_line(service, job):
    service.move(job, "CANCELLED")
    entries, state = read_stream(service, f"/v1/jobs/{job}/logs?tail=4")
    assert ([line["text"] for _, line in entries], state) == ([*LINES[1:]], "CANCELLED")
    headers = {"Last-Event-ID": entries[1][0]}
    again = service.http.get(f"/v1/jobs/{job}/logs?follow=true&tail=4", headers=headers).text
    said = [json.loads(line[6:])["text"] for line in again.splitlines() if line.startswith('data: {"time"')]
    assert said == [*LINES[3:]]


def test_log_pages_go_back_in_time_by_cursor(service, job):
    page = asked(service, job, tail=4)
    before = asked(service, job, tail=1, before=page["earlier_cursor"])
    first = asked(service, job, tail=100, before=before["earlier_cursor"])
    assert texts(first) + texts(before) + texts(page) == texts(asked(service, job))
    assert (first["earlier"], first["earlier_cursor"]) == (False, None)
    foreign = service.http.get(f"/v1/jobs/{job}/logs", params={"tail": 1, "rank": 0, "before": page["earlier_cursor"]})
    assert foreign.status_code == 422


def test_stream_has_no_earlier_part(service, job):
    service.move(job, "CANCELLED")
    earlier = asked(service, job, tail=2)["earlier_cursor"]
    for more in ({"follow": "true"}, {"cursor": asked(service, job, limit=1)["resume_cursor"]}):
        answer = service.http.get(f"/v1/jobs/{job}/logs", params={"tail": 1, "before": earlier, **more})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "before")


def test_log_stream_of_a_finished_job_waits_briefly_for_late_lines(service, job, monkeypatch):
    """A node that was lost may bring what was printed on it later, or never."""
    service.report(job, [{"step": 1, "loss": 2.5}])
    service.move(job, "CANCELLED")
    now = [service.store.query(jobs.get, job).finished_at + logs._LATE_SECONDS - 1.0]
    monkeypatch.setattr(logs, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    monkeypatch.setattr(LogsInHome, "is_complete", lambda self, job_id: False)
    monkeypatch.setattr(LogsInHome, "version", lambda self, job_id: time.monotonic())

    def late(line):
        if line["text"] == LINES[-1]:
            add(service, job, 1, "came late", begin=99.0)
        if line["text"] == "came late":
            now[0] += 2.0
        return False

    entries, state = read_stream(service, f"/v1/jobs/{job}/logs", until=late)
    assert (entries[-1][1]["text"], state) == ("came late", "CANCELLED")


def test_log_stream_resumes_once_unreadable_logs_are_readable(service, job, monkeypatch):
    source, looks = LogsInHome.source, itertools.count()

    def away_at_first(self, job_id, fresh=True):
        if next(looks) < 2:
            raise LogsUnavailable("the bucket is away")
        return source(self, job_id, fresh)

    monkeypatch.setattr(LogsInHome, "source", away_at_first)
    monkeypatch.setattr(LogsInHome, "version", lambda self, job_id: time.monotonic())
    service.move(job, "CANCELLED")
    entries, _ = read_stream(service, f"/v1/jobs/{job}/logs?rank=0")
    assert [line["text"] for _, line in entries] == [*LINES]


def test_log_cursor_of_another_filter_is_refused(service, job):
    cursor = asked(service, job, search="step", limit=1)["resume_cursor"]
    for other in ({}, {"search": "loss"}, {"search": "step", "rank": 0}):
        answer = service.http.get(f"/v1/jobs/{job}/logs", params={**other, "cursor": cursor})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "cursor")


@pytest.mark.parametrize(
    ("parameters", "path", "part"),
    [
        ({"regex": "(a"}, "regex", "missing ): (a"), ({"regex": r"(a)\1"}, "regex", "invalid escape sequence"),
        ({"regex": "a" * 501}, "regex", "500"), ({"level": "loud"}, "level", "'debug'"),
        ({"before": "x"}, "before", "requires tail"),
        ({"stream": "stdin"}, "stream", "'stdout'"), ({"tail": 0}, "tail", "1"), ({"search": ""}, "search", "1"),
    ],
)  # fmt: skip
def test_invalid_log_parameter_is_named(service, job, parameters, path, part):
    for follow in ("false", "true"):
        answer = service.http.get(f"/v1/jobs/{job}/logs", params={**parameters, "follow": follow})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
        assert part in answer.json()["detail"]


@pytest.fixture
def patient(monkeypatch):
    """A service that searches to the end, however long that takes."""
    monkeypatch.setattr(logs, "_SEARCH_SECONDS", 60.0)


def test_log_search_finds_a_line_behind_many_others(service, job, monkeypatch, patient):
    monkeypatch.setattr("manta.service.logs.pages.MIN_CHUNK_BYTES", 200)
    monkeypatch.setattr("manta.api.routes.logs.read_page", _in_small_parts)
    add(service, job, 0, *["nothing"] * 500, "the needle", begin=100.0)
    assert texts(asked(service, job, search="needle")) == ["the needle"]


@pytest.mark.parametrize("limit", [2, 3])
def test_log_search_returns_no_more_lines_than_its_limit(service, job, monkeypatch, patient, limit):
    monkeypatch.setattr("manta.service.logs.pages.MIN_CHUNK_BYTES", 400)
    monkeypatch.setattr("manta.api.routes.logs.read_page", _in_small_parts)
    needles = [f"needle {number}" for number in range(9)]
    add(service, job, 0, needles[0], *["nothing"] * 50, *needles[1:], begin=100.0)
    page = asked(service, job, search="needle", limit=limit)
    assert texts(page) == needles[:limit]
    assert texts(asked(service, job, search="needle", cursor=page["next_cursor"])) == needles[limit:]


def _in_small_parts(source, position, rank, limit, **more):
    from manta.service.logs.pages import read_page

    return read_page(source, position, rank, limit, max_bytes=1, **more)


def test_log_of_an_unknown_rank_is_refused_and_of_a_former_rank_served(service, job, monkeypatch):
    add(service, job, 6, "from before")
    assert texts(asked(service, job, rank=6)) == ["from before"]
    assert texts(asked(service, job, rank=3)) == [], "a rank that has printed nothing"
    for parameters in ({}, {"tail": 1}, {"follow": True}):
        answer = service.http.get(f"/v1/jobs/{job}/logs", params={"rank": 9, **parameters})
        assert (answer.status_code, answer.json()["code"]) == (404, "rank_not_found")
        assert answer.json()["detail"] == f"{job} has no rank 9; its ranks are 0 to 3"
    monkeypatch.setattr(LogsInHome, "source", Mock(side_effect=LogsUnavailable(OSError("the bucket is away"))))
    answer = service.http.get(f"/v1/jobs/{job}/logs", params={"rank": 9})
    assert answer.json()["code"] == "logs_unavailable", "what cannot be read is not known to be absent"


def test_logs_of_all_ranks_need_no_layout(service, job, monkeypatch):
    monkeypatch.setattr(views, "ranks_of", Mock(side_effect=AssertionError("the layout was validated")))
    assert len(texts(asked(service, job))) == 6
    assert problem_of(service.http.get("/v1/jobs/job_000000000000/logs")) == (404, "job_not_found")
