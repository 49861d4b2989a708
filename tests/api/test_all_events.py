"""GET /v1/events: what happened to all jobs, in one order, from where a reader stopped."""

import json
from functools import partial

import pytest

from manta.api.client import Client
from manta.api.routes import events as route
from manta.service.store import deletion, events
from tests.api.test_sse_server import read_stream


def tell(service, job, kind, message):
    service.store.write(lambda session: events.append(session, job["id"], kind, message))


@pytest.fixture
def two(service):
    """Two jobs, of which something is told in turns."""
    made = [service.submit(), service.submit()]
    for number in range(3):
        for job in made:
            tell(service, job, f"kind_{number % 2}", f"{number}")
    return made


def test_events_of_all_jobs_are_listed_in_order_of_time(service, two):
    first, second = two
    answer = service.http.get("/v1/events").json()
    assert [event["job"] for event in answer["items"]] == [first["id"], second["id"]] * 4
    assert set(answer["items"][0]) == {
        "id", "job", "time", "type", "generation", "rank", "step", "message", "data"
    }  # fmt: skip
    ids = [int(event["id"]) for event in answer["items"]]
    assert ids == sorted(ids)
    assert answer["next_cursor"] is None


def test_events_of_all_jobs_are_filtered_by_job_and_type(service, two):
    def events_of(**parameters):
        items = service.http.get("/v1/events", params=parameters).json()["items"]
        return [(event["job"], event["message"]) for event in items if event["type"] != "submitted"]

    first, second = two[0]["id"], two[1]["id"]
    assert events_of(job=first) == [(first, "0"), (first, "1"), (first, "2")]
    assert events_of(type="kind_1") == [(first, "1"), (second, "1")]
    assert events_of(type="kind_0", job=second) == [(second, "0"), (second, "2")]
    assert events_of(type="nothing") == events_of(job="job_000000000000") == []


def test_event_pages_continue_after_a_job_was_deleted(service, two):
    first, second = two
    page = service.http.get("/v1/events", params={"limit": 5, "job": second["id"]}).json()
    assert page["next_cursor"] is None
    pages = [service.http.get("/v1/events", params={"limit": 5}).json()]
    service.move(second["id"], "CANCELLED")
    service.store.write(lambda session: deletion.begin(session, second["id"]))
    service.store.write(lambda session: deletion.end(session, second["id"]))
    pages.append(service.http.get("/v1/events", params={"cursor": pages[0]["next_cursor"]}).json())
    tell(service, first, "told", "later")
    pages.append(service.http.get("/v1/events", params={"cursor": pages[1]["resume_cursor"]}).json())
    assert [[event["message"] for event in each["items"]][-1] for each in pages] == ["1", "2", "later"]
    assert {event["job"] for each in pages[1:] for event in each["items"]} == {first["id"]}


@pytest.mark.parametrize("query", ["job=nonsense", "type=", "limit=0", "cursor=AAAA"])
def test_invalid_event_filter_is_named(service, query):
    response = service.http.get(f"/v1/events?{query}")
    assert response.status_code == 422
    assert [error["path"] for error in response.json()["errors"]] == [query.partition("=")[0]]


def test_event_cursor_is_bound_to_its_filter(service, two):
    cursor = service.http.get("/v1/events", params={"type": "kind_1"}).json()["resume_cursor"]
    assert service.http.get("/v1/events", params={"type": "kind_1", "cursor": cursor}).json()["items"] == []
    refused = service.http.get("/v1/events", params={"cursor": cursor})
    assert (refused.status_code, "another filter" in refused.json()["detail"]) == (422, True)


def test_event_stream_resumes_after_the_last_event_id(service, two):
    entries, _ = read_stream(service, "/v1/events?type=kind_1", until=lambda event: event["job"] == two[1]["id"])
    assert [event["message"] for _, event in entries] == ["1", "1"]
    tell(service, two[0], "kind_1", "later")
    again = {"Last-Event-ID": entries[-1][0]}
    entries, _ = read_stream(service, "/v1/events?type=kind_1", headers=again, until=lambda event: True)
    assert [event["message"] for _, event in entries] == ["later"]
    cursor = service.http.get("/v1/events", params={"type": "kind_1"}).json()["resume_cursor"]
    tell(service, two[1], "kind_1", "latest")
    entries, _ = read_stream(service, f"/v1/events?type=kind_1&cursor={cursor}", until=lambda event: True)
    assert [event["message"] for _, event in entries] == ["latest"], "behind a page, too"
    for broken in ("x", "-1", "9" * 30):
        headers = {"Last-Event-ID": broken, "Accept": "text/event-stream"}
        assert service.http.get("/v1/events", headers=headers).status_code == 422


def test_quiet_event_stream_repeats_no_event_after_its_keepalive(service, two, monkeypatch):
    page_of_all, looks = events.page_of_all, []

    def poll(*arguments):
        page = page_of_all(*arguments)
        looks.append(page.items)
        if looks == [[]]:  # the first one, so that nothing is told after the test
            tell(service, two[0], "told", "later")
        return page

    last = service.http.get("/v1/events").json()["items"][-1]["id"]
    monkeypatch.setattr(events, "page_of_all", poll)
    entries, _ = read_stream(service, "/v1/events", headers={"Last-Event-ID": last}, until=lambda event: True)
    assert [event["message"] for _, event in entries] == ["later"]


def test_event_stream_advances_past_events_it_filters_out(service, two):
    newest = int(service.http.get("/v1/events").json()["items"][-1]["id"])
    tail = partial(route._poll_all, service.store, None, "told", None)
    assert tail(0).position == newest
    tell(service, two[0], "told", "a")
    tell(service, two[1], "kind_0", "b")
    batch = tail(newest)
    assert [json.loads(entry.data)["message"] for entry in batch.entries] == ["a"]
    assert batch.position == newest + 2 == tail(newest + 2).position
    assert tail(10**9).position == 10**9, "of a database that is older than the reader"


def test_stream_that_is_far_behind_leaves_nothing_out(service, two, monkeypatch):
    monkeypatch.setattr(route, "_STREAM_PAGE", 3)
    tail, position, seen = partial(route._poll_all, service.store, None, None, None), 0, []
    while (batch := tail(position)).entries:
        seen += [entry.id for entry in batch.entries]
        position = batch.position
    assert seen == [event["id"] for event in service.http.get("/v1/events").json()["items"]]


def test_client_reads_and_follows(service, two):
    with Client(service.url) as client:
        page = client.all_events(type="kind_0", limit=1)
        assert (page.items[0].job, page.items[0].message) == (two[0]["id"], "0")
        assert len(client.all_events(type="kind_0", cursor=page.next_cursor).items) == 3
        following = client.follow_all_events(two[1]["id"], after=page.items[0].id)
        assert json.loads(next(following).model_dump_json())["job"] == two[1]["id"]
        following.close()
