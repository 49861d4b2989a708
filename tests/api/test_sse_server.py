"""Live streams: everything once, in order, from where a client stopped, until the job is final."""

import asyncio
import contextlib
import json
import math
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from manta.api import streams as sse
from manta.api.app_state import attach_state
from manta.api.routes import events as events_route
from manta.api.routes import logs
from manta.api.security.rate_limits import CallerLimits
from manta.api.streams import AWAY_SECONDS, KEEPALIVE_SECONDS, PRESENCE_SECONDS, Batch, Changes, Entry, Watched
from manta.service.logs.pages import log_file, log_folder
from manta.service.states import JobState
from manta.service.store import deletion, events, jobs
from tests.api.support.keys import ADMIN, bearer
from tests.service.support.virtual_time import VirtualTimeLoop

SECONDS = 60.0


def read_stream(service, path, *, headers=None, until=None):
    """The entries of a stream as (id, data); ends with the stream, or after the entry that `until` accepts."""
    entries, state, fields = [], None, {}
    deadline = time.monotonic() + SECONDS
    asked = {"Accept": "text/event-stream", **(headers or {})}
    with service.http.stream("GET", path, headers=asked) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():  # comments come all the while
            assert time.monotonic() < deadline, f"the stream goes on after {len(entries)} entries"
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
                continue
            if fields.get("event") == "end":
                state = json.loads(fields["data"])["state"]
            elif "data" in fields:
                entries.append((fields["id"], json.loads(fields["data"])))
                if until is not None and until(entries[-1][1]):
                    break
            fields = {}
    return entries, state


def tell(service, job_id, text):
    service.store.write(lambda session: events.append(session, job_id, "told", text))


def test_event_stream_shows_past_and_new_events_and_ends_with_the_job(service, job):
    tell(service, job["id"], "before")

    def later():
        tell(service, job["id"], "during")
        service.move(job["id"], "STARTING", "SUCCEEDED")

    def is_before(event):
        if event["message"] == "before":
            threading.Thread(target=later).start()

    entries, state = read_stream(service, f"/v1/jobs/{job['id']}/events", until=is_before)
    messages = [event["message"] for _, event in entries if event["type"] == "told"]
    assert messages == ["before", "during"]
    assert state == "SUCCEEDED"
    assert [entry_id for entry_id, _ in entries] == [event["id"] for _, event in entries]


def test_event_stream_resumes_after_its_last_event_id(service, job):
    for number in range(5):
        tell(service, job["id"], str(number))
    path = f"/v1/jobs/{job['id']}/events"
    first, _ = read_stream(service, path, until=lambda event: event["message"] == "2")
    service.move(job["id"], "STARTING", "SUCCEEDED")
    rest, _ = read_stream(service, path, headers={"Last-Event-ID": first[-1][0]})
    assert [event["message"] for _, event in rest][:2] == ["3", "4"]


@pytest.mark.parametrize("resource", ["events", "logs"])
def test_event_stream_begins_at_a_cursor_unless_last_event_id_is_later(service, job, resource):
    folder = log_folder(service.control.home, job["id"])
    folder.mkdir(parents=True)
    for number in range(4):
        tell(service, job["id"], str(number))
        with log_file(folder, 0).open("a") as file:
            file.write(json.dumps({"time": number, "rank": 0, "generation": 1, "text": str(number)}) + "\n")
    service.move(job["id"], "CANCELLED")
    path = f"/v1/jobs/{job['id']}/{resource}"
    everything, _ = read_stream(service, path)
    page = service.http.get(path, params={"limit": 2}).json()
    assert page["items"] == [data for _, data in everything[:2]]
    behind_it = f"{path}?cursor={page['next_cursor']}"
    assert read_stream(service, behind_it)[0] == everything[2:]
    assert read_stream(service, behind_it, headers={"Last-Event-ID": everything[2][0]})[0] == everything[3:]


def test_event_stream_of_a_finished_job_spans_several_pages(service, monkeypatch):
    monkeypatch.setattr(events_route, "_STREAM_PAGE", 2)
    job = service.submit()
    for number in range(4):
        tell(service, job["id"], str(number))
    service.move(job["id"], "CANCELLED")
    entries, state = read_stream(service, f"/v1/jobs/{job['id']}/events")
    assert ([event["message"] for _, event in entries][1:5], len(entries), state) == (list("0123"), 6, "CANCELLED")


def test_event_stream_of_a_finished_job_ends_by_itself(service, job):
    service.move(job["id"], "CANCELLED")
    entries, state = read_stream(service, f"/v1/jobs/{job['id']}/events?follow=true", headers={"Accept": "*/*"})
    assert (len(entries), state) == (2, "CANCELLED")
    assert read_stream(service, f"/v1/jobs/{job['id']}/logs") == ([], "CANCELLED")


@pytest.mark.parametrize("query", ["", "?rank=0"])
def test_log_stream_sends_line_by_line_and_resumes_after_any_line(service, job, query):
    folder = log_folder(service.control.home, job["id"])
    folder.mkdir(parents=True)
    for rank in (0, 1):
        lines = [{"time": n * 2 + rank, "rank": rank, "generation": 1, "text": f"{rank}-{n}"} for n in range(700)]
        log_file(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    service.move(job["id"], "CANCELLED")
    path = f"/v1/jobs/{job['id']}/logs{query}"
    everything, _ = read_stream(service, path)
    assert len(everything) == (700 if query else 1400)
    assert [line["time"] for _, line in everything] == sorted(line["time"] for _, line in everything)
    for stop in (0, 1, 333, len(everything) - 1):
        rest, _ = read_stream(service, path, headers={"Last-Event-ID": everything[stop][0]})
        assert rest == everything[stop + 1 :]


def test_log_stream_contains_the_last_line_of_a_job(service, job):
    folder = log_folder(service.control.home, job["id"])
    folder.mkdir(parents=True)

    def end(line):
        with log_file(folder, 0).open("a") as file:
            file.write(json.dumps({"time": 2, "rank": 0, "generation": 1, "text": "last"}) + "\n")
        service.move(job["id"], "CANCELLED") if line["text"] == "first" else None

    log_file(folder, 0).write_text(json.dumps({"time": 1, "rank": 0, "generation": 1, "text": "first"}) + "\n")
    seen = []

    def once(line):
        if not seen:
            end(line)
        seen.append(line["text"])

    read_stream(service, f"/v1/jobs/{job['id']}/logs", until=once)
    assert seen == ["first", "last"]


def test_log_stream_contains_a_last_line_written_while_the_job_ends_during_a_read(service, job, monkeypatch):
    folder = log_folder(service.control.home, job["id"])
    folder.mkdir(parents=True)
    read, looks = logs.read_page, []

    def read_page(*arguments, **more):
        page = read(*arguments, **more)
        if not looks:
            line = {"time": 1, "rank": 0, "generation": 1, "text": "last"}
            log_file(folder, 0).write_text(json.dumps(line) + "\n")
            service.move(job["id"], "CANCELLED")
        looks.append(page)
        return page

    monkeypatch.setattr(logs, "read_page", read_page)
    entries, state = read_stream(service, f"/v1/jobs/{job['id']}/logs")
    assert ([line["text"] for _, line in entries], state) == (["last"], "CANCELLED")


def said_by_a_stream(monkeypatch, seconds, news, revoked_after=math.inf, away=range(0)):
    """By second what a stream says in that time, and when it ends; `news`: what a look at the second of its key finds;
    `revoked_after`: for so many seconds its API key is good; `away`: seconds in which the database does not answer."""
    loop, left, said = VirtualTimeLoop(), dict(news), []

    def look(position):
        if int(loop.time()) in away:
            raise OperationalError("SELECT", None, OSError("no answer"))
        due = [second for second in left if second <= loop.time()]
        return Batch([Entry(str(second), left.pop(second)) for second in due], position, False, False, "RUNNING")

    class AtOnce:
        async def run(self, read):
            return read()

    class ByTheClock(Changes):
        async def _watch(self):
            for second in sorted(news):
                await asyncio.sleep(second - loop.time())
                for changed in self._streams[Watched("job")]:
                    changed.set()

    async def still_authorized(request):
        return loop.time() < revoked_after

    shared = SimpleNamespace(changes=ByTheClock(lambda: None), read_threads=SimpleNamespace(long=AtOnce()))

    class OpenRequest:
        app = SimpleNamespace(state=SimpleNamespace())

        async def is_disconnected(self):
            return False

    async def listen():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for part in sse.stream(OpenRequest(), look, 0, Watched("job")).body_iterator:
                    said.append((loop.time(), part.decode()))

    attach_state(OpenRequest.app, shared)
    monkeypatch.setattr(sse, "begin_stream", lambda request: None)
    monkeypatch.setattr(sse, "is_still_authorized", still_authorized)
    loop.run_until_complete(listen())
    ended = loop.time()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return said, ended


def test_quiet_event_stream_sends_keepalives(monkeypatch):
    said, _ = said_by_a_stream(monkeypatch, 4.5 * KEEPALIVE_SECONDS, {2 * KEEPALIVE_SECONDS - 5: "news"})
    assert [part.startswith(":") for _, part in said] == [True, True, False, True, True]
    times = [second for second, _ in said]
    quiet = [times[1] - times[0], times[3] - times[2], times[4] - times[3]]
    assert all(KEEPALIVE_SECONDS < each <= KEEPALIVE_SECONDS + 3 * PRESENCE_SECONDS for each in quiet)


def test_event_stream_ends_soon_after_its_key_is_revoked(monkeypatch):
    said, ended = said_by_a_stream(monkeypatch, 60, {3: "before", 6: "after"}, revoked_after=5)
    assert [part for _, part in said if "data:" in part] == ["data: before\nid: 3\n\n"]
    assert 5 <= ended <= 5 + 2 * PRESENCE_SECONDS


def test_event_stream_survives_a_database_outage(monkeypatch):
    said, ended = said_by_a_stream(monkeypatch, 60, {2: "before", 20: "meanwhile", 40: "after"}, away=range(19, 27))
    sent_at = {part.split("\n")[0]: second for second, part in said if "data:" in part}
    assert list(sent_at) == ["data: before", "data: meanwhile", "data: after"] and ended == 60
    assert 27 <= sent_at["data: meanwhile"] <= 27 + AWAY_SECONDS + PRESENCE_SECONDS


def test_open_event_streams_are_cheap_and_notice_that_their_client_left(service, monkeypatch):
    left, looks, looked = threading.Semaphore(0), [], sse.LongReads.run

    async def counted(self, read):
        looks.append(read)
        return await looked(self, read)

    def without(limits, key_id):
        left.release()
        end(limits, key_id)

    end = CallerLimits.end_stream
    monkeypatch.setattr(sse.LongReads, "run", counted)
    monkeypatch.setattr(CallerLimits, "end_stream", without)
    job = service.submit()
    clients = [httpx.Client(base_url=service.url, timeout=20, headers=bearer(ADMIN)) for _ in range(60)]
    streams = []
    for client in clients:
        request = client.build_request("GET", f"/v1/jobs/{job['id']}/events?follow=true")
        streams.append(client.send(request, stream=True))
        assert streams[-1].status_code == 200
    assert service.http.get("/healthz").status_code == 200
    assert service.http.get("/v1/jobs").status_code == 200, "it would not be answered before the streams end"
    tell(service, job["id"], "to all")
    for stream in streams:
        assert any("to all" in line for line in stream.iter_lines())
    assert len(looks) <= 5 * len(clients), "a look when it begins, one that makes sure of it, and one at what is new"
    for client in clients:
        client.close()
    for _ in clients:
        assert left.acquire(timeout=20), "a stream goes on although its client left"


def test_event_stream_of_a_job_deleted_meanwhile_ends(service, job):
    def vanish(session):
        jobs.transition(session, job["id"], JobState.CANCELLED)
        deletion.begin(session, job["id"])
        deletion.end(session, job["id"])

    with service.http.stream("GET", f"/v1/jobs/{job['id']}/events?follow=true") as response:
        lines = response.iter_lines()
        assert any(line.startswith("data") for line in lines)
        service.store.write(vanish)
        assert not any(line.startswith("data") for line in lines)
