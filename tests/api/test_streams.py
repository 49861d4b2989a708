"""Streams hear of what is new, and requests that wait of a change of state, with one query for all of them."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from manta.api import streams
from manta.api.client import Client
from manta.api.streams import POLL_SECONDS, Changes, StateWaits, StoredVersions, Watched
from manta.service.identity import digest_of
from manta.service.logs.pages import LogsInHome, log_folder
from manta.service.states import JobState
from manta.service.store import Store, deletion, events, jobs
from manta.service.store.installation_tables import ApiKey
from tests.api.support.keys import add_key, bearer
from tests.service.support.virtual_time import run_with_answers_at_once

ONE, OTHER = Watched("one"), Watched("other")


class Versions:
    """What is watched, and how often it was looked at."""

    def __init__(self):
        self.now, self.looks, self.broken = {ONE: 1, OTHER: 1}, [], False

    def __call__(self, watched):
        self.looks.append(sorted(each.job for each in watched))
        if self.broken:
            raise OSError("the database does not answer")
        return {each: self.now[each] for each in watched}


@pytest.fixture
def versions():
    return Versions()


def test_logs_of_a_job_that_has_printed_nothing_have_a_version_too(tmp_path):
    assert LogsInHome(tmp_path).version("job_000000000001") == frozenset()
    (log_folder(tmp_path, "job_000000000001")).mkdir(parents=True)
    (log_folder(tmp_path, "job_000000000001") / "0.log").write_text("abc")
    assert LogsInHome(tmp_path).version("job_000000000001") == {("0.log", 3)}


def test_change_watch_polls_once_for_all_streams_and_wakes_only_those_with_news(versions):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE) as first, changes.of(ONE) as second, changes.of(OTHER) as third:
            await asyncio.sleep(POLL_SECONDS / 2)
            for each in (first, second, third):
                each.clear()
            versions.looks.clear()
            versions.now[ONE] = 2
            await asyncio.sleep(POLL_SECONDS)
            assert [each.is_set() for each in (first, second, third)] == [True, True, False]
            assert versions.looks == [["one", "other"]]
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(POLL_SECONDS)
        versions.looks.clear()
        await asyncio.sleep(100 * POLL_SECONDS)
        assert versions.looks == []

    run_with_answers_at_once(main())


def test_new_subscriber_of_changes_is_woken_once(versions):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE):
            await asyncio.sleep(POLL_SECONDS / 2)
            with changes.of(OTHER) as late:
                await asyncio.sleep(POLL_SECONDS)
                assert late.is_set()
                late.clear()
                await asyncio.sleep(5 * POLL_SECONDS)
                assert not late.is_set()
        await asyncio.sleep(2 * POLL_SECONDS)

    run_with_answers_at_once(main())


def test_change_watch_wakes_all_streams_when_the_database_answers_again(versions, caplog):
    async def main():
        changes = Changes(versions)
        with changes.of(ONE) as first, changes.of(OTHER) as second:
            await asyncio.sleep(POLL_SECONDS / 2)
            for versions.broken, notified in ((True, False), (False, True), (True, False), (False, True)):
                for each in (first, second):
                    each.clear()
                await asyncio.sleep(5 * POLL_SECONDS)
                assert [each.is_set() for each in (first, second)] == [notified, notified]
        await asyncio.sleep(2 * POLL_SECONDS)

    run_with_answers_at_once(main())
    assert len(caplog.records) == 2


def test_versions_change_with_events_states_files_and_the_end_of_a_job(service, tmp_path):
    store, job, other = service.store, service.submit()["id"], service.submit()["id"]
    logs = log_folder(tmp_path, job)
    logs.mkdir(parents=True)
    watched = [Watched(job), Watched(other), Watched(), Watched(job, logs=True)]
    look = StoredVersions(lambda: store, lambda: LogsInHome(tmp_path))
    look(watched)

    def changed_by(operation):
        before = look(watched)
        operation()
        after = look(watched)
        return [before[each] != after[each] for each in watched]

    assert changed_by(lambda: None) == [False] * 4
    tell = lambda: store.write(lambda session: events.append(session, job, "told", "news"))  # noqa: E731
    assert changed_by(tell) == [True, False, True, False]
    assert changed_by(lambda: (logs / "rank-0.jsonl").write_text("line")) == [False, False, False, True]
    move = lambda: store.write(lambda session: jobs.transition(session, other, JobState.CANCELLED))  # noqa: E731
    assert changed_by(move) == [False, True, True, False]
    gone = lambda: store.write(lambda s: (deletion.begin(s, other), deletion.end(s, other)))  # noqa: E731
    assert changed_by(gone)[1] is True


def test_change_watch_reports_everything_as_new_after_a_database_switch(service, empty_database, tmp_path):
    other = Store(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'other.db')}")
    current, watched = [service.store], [Watched()]
    look = StoredVersions(lambda: current[0], lambda: LogsInHome(service.control.home))
    assert look(watched) == {}
    assert look(watched) == look(watched) != {}
    current[0] = other
    assert look(watched) == {}, "whatever its numbers are"
    assert look(watched) == look(watched) != {}
    other.close()


LONG = 20  # seconds that no test waits for


def ask(service, job, **parameters):
    """The answer, and how long it took."""
    began = time.monotonic()
    response = service.http.get(f"/v1/jobs/{job['id']}", params=parameters)
    return response, time.monotonic() - began


def test_state_wait_is_answered_when_the_state_changes(service, job):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, service, job, wait=LONG, state="QUEUED")
        time.sleep(2 * streams.POLL_SECONDS)
        assert not waiting.done()
        service.move(job["id"], "STARTING")
        response, seconds = waiting.result()
    assert (response.status_code, response.json()["state"]) == (200, "STARTING")
    assert seconds < LONG / 2


async def test_state_wait_without_a_state_waits_for_a_change_of_the_current_one():
    states, looked = {"job": "STARTING"}, threading.Event()

    def states_of(job_ids):
        seen = dict(states)
        looked.set()
        return seen

    wait = asyncio.create_task(StateWaits(states_of).until_changed("job", None, LONG))
    await asyncio.to_thread(looked.wait)
    await asyncio.sleep(2 * streams.POLL_SECONDS)
    assert not wait.done()
    states["job"] = "RUNNING"
    async with asyncio.timeout(LONG / 2):
        await wait


def test_state_wait_notices_a_change_before_the_request(service, job):
    service.move(job["id"], "STARTING")
    response, seconds = ask(service, job, wait=LONG, state="QUEUED")
    assert response.json()["state"] == "STARTING"
    assert seconds < LONG / 2


def test_state_wait_returns_at_once_for_final_changed_or_unknown_jobs(service, job):
    service.move(job["id"], "CANCELLED")
    for parameters in ({"wait": LONG}, {"wait": LONG, "state": "CANCELLED"}, {"wait": 0, "state": "QUEUED"}):
        response, seconds = ask(service, job, **parameters)
        assert response.json()["state"] == "CANCELLED"
        assert seconds < LONG / 2
    unknown, seconds = ask(service, {"id": "job_000000000000"}, wait=LONG)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "job_not_found")
    assert seconds < LONG / 2


def test_state_wait_returns_the_unchanged_job_at_its_timeout(service, job):
    response, seconds = ask(service, job, wait=0.3)
    assert (response.status_code, response.json()["state"]) == (200, "QUEUED")
    assert seconds >= 0.3


@pytest.mark.parametrize(("parameter", "value"), [("wait", 61), ("wait", -1), ("wait", "nan"), ("state", "ASLEEP")])
def test_state_wait_with_an_invalid_time_or_state_is_refused(service, parameter, value):
    response, _ = ask(service, service.submit(), **{parameter: value})
    assert (response.status_code, response.json()["errors"][0]["path"]) == (422, parameter)


def test_many_state_waits_do_not_block_other_requests_and_are_all_answered(service, job):
    """More than there are threads for requests."""
    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(ask, service, job, wait=LONG) for _ in range(60)]
        began = time.monotonic()
        for _ in range(5):
            assert service.http.get(f"/v1/jobs/{job['id']}/ranks").status_code == 200
        assert time.monotonic() - began < LONG / 2
        assert not any(wait.done() for wait in waiting)
        service.move(job["id"], "CANCELLED")
        assert {wait.result()[0].json()["state"] for wait in waiting} == {"CANCELLED"}


def test_concurrent_state_waits_share_one_database_query():
    looks = []

    def states_of(job_ids):
        looks.append(set(job_ids))
        return dict.fromkeys(job_ids, "QUEUED")

    async def main():
        waits, seconds = StateWaits(states_of), 2.5 * streams.POLL_SECONDS
        await asyncio.gather(*(waits.until_changed(f"job {n}", None, seconds) for n in range(20)))
        await asyncio.sleep(2 * streams.POLL_SECONDS)
        before = len(looks)
        await asyncio.sleep(2 * streams.POLL_SECONDS)
        assert len(looks) == before, "nobody waits, and it still looks"

    run_with_answers_at_once(main())
    first, later = looks[:20], looks[20:]
    assert all(len(look) == 1 for look in first), "each looks once when it comes"
    assert 1 <= len(later) <= 4
    assert max(map(len, later)) == 20


@pytest.mark.parametrize("ended", [{"revoked_at": 1.0}, {"expires_at": 1.0}], ids=["revoked", "expired"])
def test_state_wait_is_refused_once_its_key_is_invalid(service, monkeypatch, ended):
    job, key, waits, until_changed = (
        service.submit(),
        add_key(service.store),
        threading.Event(),
        StateWaits.until_changed,
    )

    def noted(*arguments):
        waits.set()
        return until_changed(*arguments)

    monkeypatch.setattr(StateWaits, "until_changed", noted)
    with ThreadPoolExecutor(1) as pool:
        address = f"/v1/jobs/{job['id']}?wait={LONG}"
        answer = pool.submit(service.http.get, address, headers=bearer(key), timeout=2 * LONG)
        assert waits.wait(LONG)
        service.store.write(lambda s: s.execute(update(ApiKey).where(ApiKey.digest == digest_of(key)).values(**ended)))
        response = answer.result()
    assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
    assert ("was revoked" if "revoked_at" in ended else "has expired") in response.json()["detail"]


def test_state_wait_is_answered_with_503_if_the_database_is_away(service, job, monkeypatch):
    def away(*arguments):
        raise OperationalError("SELECT", {}, Exception("database is locked"))

    timer = threading.Timer(0.5, monkeypatch.setattr, ("manta.service.store.jobs.states", away))
    timer.start()
    response, seconds = ask(service, job, wait=LONG)
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["Retry-After"]
    assert seconds < LONG / 2


def test_client_wait_returns_when_the_job_is_final(service, job):
    with Client(service.url) as client:
        assert client.job(job["id"], wait=0.1).state == "QUEUED"
        threading.Timer(0.3, service.move, (job["id"], "STARTING", "RUNNING", "SUCCEEDED")).start()
        assert client.wait(job["id"]).state == "SUCCEEDED"


@pytest.mark.parametrize(
    ("now", "known"), [("STARTING", "QUEUED"), ("FAILED", "FAILED"), ("FAILED", None), (None, None)]
)
def test_state_wait_needs_one_look_if_the_state_differs_or_cannot_change(now, known):
    looks = []

    def states_of(job_ids):
        looks.append(set(job_ids))
        return {} if now is None else {"job": now}

    asyncio.run(StateWaits(states_of).until_changed("job", known, LONG))
    assert looks == [{"job"}]


async def test_state_waits_end_when_the_service_ends():
    waits = StateWaits(lambda job_ids: {"job": "RUNNING"})
    wait = asyncio.create_task(waits.until_changed("job", None, LONG))
    while not waits._waits:
        await asyncio.sleep(0)
    waits.close()
    async with asyncio.timeout(LONG / 2):
        await wait
        await waits.until_changed("job", None, LONG)
