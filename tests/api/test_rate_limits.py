"""How much one caller may ask for, on a clock of the test's own; and what a service answers to more."""

import json
import threading
from unittest.mock import Mock

import httpx
import pytest

from manta.api.security import rate_limits
from manta.api.security.rate_limits import CallerLimits, TokenBuckets, TooManyRequests
from manta.service.settings import RequestLimits
from manta.service.store import audit
from tests.api.conftest import FakeControl, serving
from tests.api.support.keys import ADMIN, add_admin, add_key, bearer


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self):
        return self.now


def test_token_bucket_allows_a_two_second_burst_and_then_its_rate():
    clock = Clock()
    buckets = TokenBuckets(5.0, clock)
    assert [buckets.take("a") for _ in range(10)] == [0.0] * 10
    assert buckets.take("a") == pytest.approx(0.2)
    assert buckets.take("b") == 0.0, "each caller has its own"
    clock.now = 0.2
    assert buckets.take("a") == 0.0
    assert buckets.take("a") > 0
    clock.now = 1000.0
    assert [buckets.take("a") for _ in range(10)] == [0.0] * 10
    assert buckets.take("a") > 0, "it does not fill for ever"


def test_refused_requests_do_not_extend_the_wait_of_a_rate_limited_caller():
    clock = Clock()
    buckets = TokenBuckets(5.0, clock)
    while not buckets.take("a"):
        pass
    for clock.now in (0.05, 0.1, 0.15, 0.19):
        assert buckets.take("a") == pytest.approx(0.2 - clock.now)
    clock.now = 0.21
    assert buckets.take("a") == 0.0


def test_rate_of_zero_disables_the_request_limit():
    buckets = TokenBuckets(0, Clock())
    assert {buckets.take("a") for _ in range(1000)} == {0.0}


def test_rate_limiter_remembers_a_bounded_number_of_callers(monkeypatch):
    monkeypatch.setattr(rate_limits, "_MAX_CALLERS", 3)
    clock = Clock()
    buckets = TokenBuckets(1.0, clock)
    for caller in "aabbccd":
        assert buckets.take(caller) == 0.0
    assert buckets.take("b") > 0 and buckets.take("a") == 0.0, "the one that was forgotten has a full one"


def test_concurrent_requests_and_streams_are_counted_until_they_end():
    limits = CallerLimits(RequestLimits(0, requests_at_once=2, streams_at_once=1), Clock())
    limits.begin_request("a")
    limits.begin_request("a")
    with pytest.raises(TooManyRequests, match=r"2 requests open at once \(MANTA_REQUESTS_AT_ONCE"):
        limits.begin_request("a")
    limits.begin_request("b")
    limits.end_request("a")
    limits.begin_request("a")
    limits.begin_stream("a")
    with pytest.raises(TooManyRequests, match="MANTA_STREAMS_AT_ONCE"):
        limits.begin_stream("a")
    limits.end_stream("a")
    limits.begin_stream("a")


def test_rate_limited_request_gets_retry_after(tmp_path, store):
    add_admin(store)
    other = add_key(store, "read")
    slow = RequestLimits(requests_per_second=1e-3, anonymous_per_second=1e-3)
    with serving(FakeControl(store, tmp_path), slow) as url, httpx.Client(base_url=url, timeout=20) as http:
        for shown, first in ((bearer(ADMIN), 200), ({}, 401)):
            assert http.get("/v1/jobs", headers=shown).status_code == first
            refused = http.post("/v1/jobs", headers=shown, json={})
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
            assert 1 <= int(refused.headers["Retry-After"]) <= 1000
        assert http.get("/healthz").status_code == 429, "of this address, without a key"
        assert http.get("/v1/jobs", headers=bearer(other)).status_code == 200, "a key is not to blame for that"
    assert store.query(audit.page, None).items == [], "who asks too often does not fill the database by that"


def test_concurrent_streams_are_limited_and_their_places_freed(tmp_path, store):
    add_admin(store)
    one = RequestLimits(0, streams_at_once=1, anonymous_per_second=0)
    path = "/v1/events?follow=true"
    with (
        serving(FakeControl(store, tmp_path), one) as url,
        httpx.Client(base_url=url, timeout=20, headers=bearer(ADMIN)) as http,
    ):
        with http.stream("GET", path) as stream:
            parts = stream.iter_raw()
            next(parts)
            for _ in range(2):  # one that is refused gives back nobody's place
                with http.stream("GET", path) as refused:
                    assert refused.status_code == 429
                    assert json.loads(refused.read())["code"] == "too_many_requests"
        for _ in range(100):
            with http.stream("GET", path) as stream:
                if stream.status_code == 200:
                    break
            threading.Event().wait(0.1)
        assert stream.status_code == 200


def test_failed_request_frees_its_place(tmp_path, store, monkeypatch):
    add_admin(store)
    control = FakeControl(store, tmp_path)
    monkeypatch.setattr(control, "cluster", Mock(side_effect=RuntimeError("a defect")))
    two = RequestLimits(0, requests_at_once=2, anonymous_per_second=0)
    with serving(control, two) as url, httpx.Client(base_url=url, timeout=20, headers=bearer(ADMIN)) as http:
        assert [http.get("/v1/cluster").status_code for _ in range(4)] == [500] * 4
        assert http.get("/v1/jobs").status_code == 200


def test_keys_and_addresses_have_rates_of_their_own_and_a_refused_request_takes_no_place():
    clock = Clock()
    limits = CallerLimits(RequestLimits(1.0, requests_at_once=3, streams_at_once=1, anonymous_per_second=2.0), clock)
    for _ in range(4):
        limits.anonymous("a")
    with pytest.raises(TooManyRequests) as refused:
        limits.anonymous("a")
    assert refused.value.retry_seconds == pytest.approx(0.5)
    limits.begin_request("a")
    limits.begin_request("a")
    for _ in range(5):
        with pytest.raises(TooManyRequests, match="MANTA_REQUESTS_PER_SECOND") as refused:
            limits.begin_request("a")
        assert refused.value.retry_seconds == pytest.approx(1.0)
    clock.now = 10.0
    limits.begin_request("a")
    with pytest.raises(TooManyRequests, match="MANTA_REQUESTS_AT_ONCE"):
        limits.begin_request("a")
    limits.begin_stream("a")
    limits.begin_stream("b")
    limits.end_stream("b")
    with pytest.raises(TooManyRequests, match="MANTA_STREAMS_AT_ONCE"):
        limits.begin_stream("a")
