"""Lists of jobs over REST: filters, orders, counts and sparklines."""

import pytest

from manta.api import caches
from manta.api.client import Client
from tests.api.support.keys import add_key, bearer


def ids_of(service, **parameters):
    answer = service.http.get("/v1/jobs", params=parameters)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["items"]]


def test_job_list_accepts_states_repeated_or_comma_separated(service):
    ids = [service.submit()["id"] for _ in range(3)]
    service.move(ids[0], "CANCELLED")
    service.move(ids[1], "STARTING")
    both = [ids[1], ids[0]]
    assert ids_of(service, state="CANCELLED,STARTING") == both == ids_of(service, state=["STARTING", "CANCELLED"])
    assert ids_of(service, state=["STARTING,CANCELLED", "PAUSED"]) == both
    assert ids_of(service, state="QUEUED") == [ids[2]]


def test_job_list_combines_filters_order_and_cursor(service):
    named = {name: service.submit(name=name, labels={"team": "a"})["id"] for name in ("c", "a", "b")}
    service.submit(name="run one")
    wanted = {"label": "team=a", "sort": "name", "order": "asc", "limit": 2}
    page = service.http.get("/v1/jobs", params=wanted).json()
    assert [job["name"] for job in page["items"]] == ["a", "b"]
    assert ids_of(service, **wanted, cursor=page["next_cursor"]) == [named["c"]]
    foreign = service.http.get("/v1/jobs", params={**wanted, "order": "desc", "cursor": page["next_cursor"]})
    assert (foreign.status_code, foreign.json()["errors"][0]["path"]) == (422, "cursor")
    with Client(service.url) as client:
        assert [job.name for job in client.jobs(search="UN O", sort="name", order="desc").items] == ["run one"]
        assert client.count_jobs(labels=["team"]).by_state["QUEUED"] == 3


def test_job_list_distinguishes_an_empty_label_value_from_any_value(service):
    empty, full = (service.submit(labels={"team": value})["id"] for value in ("", "a"))
    asked = {"team=": [empty], "team=a": [full], "team": [full, empty], "other": []}
    assert {label: ids_of(service, label=label) for label in asked} == asked


def test_owner_is_the_user_else_the_name_of_the_key(service):
    document = service.submit()["spec"]
    for name, user in (("laptop", "ada"), ("robot", None)):
        key = add_key(service.store, "submit", name=name, user=user)
        assert service.http.post("/v1/jobs", json=document, headers=bearer(key)).json()["owner"] == (user or name)
    (job,) = service.http.get("/v1/jobs", params={"owner": "ada"}).json()["items"]
    assert job["owner"] == "ada"


def test_job_counts_have_every_state_and_obey_the_list_filters(service):
    ids = [service.submit(name=name)["id"] for name in ("a", "a", "b")]
    service.move(ids[0], "CANCELLED")
    counts = service.http.get("/v1/jobs/counts").json()
    assert (counts["total"], counts["by_state"]["QUEUED"], counts["by_state"]["CANCELLED"]) == (3, 2, 1)
    assert counts["by_state"]["PAUSED"] == 0
    counts = service.http.get("/v1/jobs/counts", params={"name": "a", "state": "QUEUED"}).json()
    assert (counts["total"], counts["by_state"]["QUEUED"]) == (1, 1)


@pytest.mark.parametrize(
    ("parameters", "path", "part"),
    [
        ({"state": "RUNING"}, "state", "'RUNING' is not a state; states are QUEUED"),
        ({"state": "RUNNING,"}, "state", "'' is not a state"),
        ({"label": "=x"}, "label", "key=value"),
        ({"label": [f"a{number}" for number in range(17)]}, "label", "at most 16"),
        ({"sort": "goodput"}, "sort", "'created'"),
        ({"order": "up"}, "order", "'asc'"),
        ({"search": ""}, "search", "at least 1"),
    ],
)
def test_invalid_job_list_parameter_is_named(service, parameters, path, part):
    answer = service.http.get("/v1/jobs", params=parameters)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
    assert part in answer.json()["detail"]


def test_sparkline_is_short_and_current(service):
    job, other = service.submit()["id"], service.submit()["id"]
    service.report(job, [{"step": step, "loss": 100.0 - step} for step in range(1, 101)])
    path = f"/v1/jobs/sparklines?jobs={other},{job},job_000000000000,{job}"
    first, second = service.http.get(path).json()["items"]
    assert (first, second["job"]) == ({"job": other, "loss": []}, job)
    losses = second["loss"]
    assert (losses[0], losses[-1]) == (99.0, 0.0) and 16 <= len(losses) <= 32 and losses == sorted(losses)[::-1]
    service.report(job, [{"step": 101, "loss": float("nan")}])
    assert service.http.get(path).json()["items"][1]["loss"][-1] == "nan"


def test_sparklines_of_unchanged_jobs_are_cached(service, monkeypatch):
    job = service.submit()["id"]
    service.report(job, [{"step": 1, "loss": 1.0}])
    asked = []
    read = caches.metrics.series

    def series(*arguments, **more):
        asked.append(arguments)
        return read(*arguments, **more)

    monkeypatch.setattr(caches.metrics, "series", series)
    for _ in range(3):
        assert service.http.get(f"/v1/jobs/sparklines?jobs={job}").json()["items"][0]["loss"] == [1.0]
    assert len(asked) == 1


@pytest.mark.parametrize("jobs", ["", "job_x", "../../etc", ",".join(["job_000000000000"] * 3) + ","])
def test_sparklines_of_invalid_job_ids_are_refused(service, jobs):
    answer = service.http.get("/v1/jobs/sparklines", params={"jobs": jobs})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "jobs")


def test_sparklines_and_counts_cover_the_callers_project_only(service):
    job = service.submit()["id"]
    asked = {"headers": bearer(add_key(service.store, "read", "other"))}
    assert service.http.get(f"/v1/jobs/sparklines?jobs={job}", **asked).json()["items"] == []
    assert service.http.get("/v1/jobs/counts", **asked).json()["total"] == 0
