"""A request may wait for a job's state to change: it is answered as soon as that happens, and holds nobody up."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from manta.api.client import Client
from manta.api.streams import changes
from manta.api.streams.changes import StateWaits
from manta.service.identity import digest_of
from manta.service.store.installation_tables import ApiKey
from tests.api.support.keys import add_key, bearer
from tests.service.support.virtual_time import run_with_answers_at_once

LONG = 20  # seconds that no test waits for


def ask(service, job, **parameters):
    """The answer, and how long it took."""
    began = time.monotonic()
    response = service.http.get(f"/v1/jobs/{job['id']}", params=parameters)
    return response, time.monotonic() - began


def test_state_wait_is_answered_when_the_state_changes(service):
    job = service.submit()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, service, job, wait=LONG, state="QUEUED")
        time.sleep(2 * changes.POLL_SECONDS)
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
    await asyncio.sleep(2 * changes.POLL_SECONDS)
    assert not wait.done()
    states["job"] = "RUNNING"
    async with asyncio.timeout(LONG / 2):
        await wait


def test_state_wait_notices_a_change_before_the_request(service):
    job = service.submit()
    service.move(job["id"], "STARTING")
    response, seconds = ask(service, job, wait=LONG, state="QUEUED")
    assert response.json()["state"] == "STARTING"
    assert seconds < LONG / 2


def test_state_wait_returns_at_once_for_final_changed_or_unknown_jobs(service):
    job = service.submit()
    service.move(job["id"], "CANCELLED")
    for parameters in ({"wait": LONG}, {"wait": LONG, "state": "CANCELLED"}, {"wait": 0, "state": "QUEUED"}):
        response, seconds = ask(service, job, **parameters)
        assert response.json()["state"] == "CANCELLED"
        assert seconds < LONG / 2
    unknown, seconds = ask(service, {"id": "job_000000000000"}, wait=LONG)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "job_not_found")
    assert seconds < LONG / 2


def test_state_wait_returns_the_unchanged_job_at_its_timeout(service):
    job = service.submit()
    response, seconds = ask(service, job, wait=0.3)
    assert (response.status_code, response.json()["state"]) == (200, "QUEUED")
    assert seconds >= 0.3


@pytest.mark.parametrize(("parameter", "value"), [("wait", 61), ("wait", -1), ("wait", "nan"), ("state", "ASLEEP")])
def test_state_wait_with_an_invalid_time_or_state_is_refused(service, parameter, value):
    response, _ = ask(service, service.submit(), **{parameter: value})
    assert (response.status_code, response.json()["errors"][0]["path"]) == (422, parameter)


def test_many_state_waits_do_not_block_other_requests_and_are_all_answered(service):
    """More than there are threads for requests."""
    job = service.submit()
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
        waits, seconds = StateWaits(states_of), 2.5 * changes.POLL_SECONDS
        await asyncio.gather(*(waits.until_changed(f"job {n}", None, seconds) for n in range(20)))
        await asyncio.sleep(2 * changes.POLL_SECONDS)
        before = len(looks)
        await asyncio.sleep(2 * changes.POLL_SECONDS)
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


def test_state_wait_is_answered_with_503_if_the_database_is_away(service, monkeypatch):
    job = service.submit()

    def away(*arguments):
        raise OperationalError("SELECT", {}, Exception("database is locked"))

    timer = threading.Timer(0.5, monkeypatch.setattr, ("manta.service.store.jobs.states", away))
    timer.start()
    response, seconds = ask(service, job, wait=LONG)
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["Retry-After"]
    assert seconds < LONG / 2


def test_client_wait_returns_when_the_job_is_final(service):
    job = service.submit()
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
