"""What takes long holds up nothing that is short."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from manta.api import planning, threads
from manta.api.caches import RenderedPages
from manta.api.routes import history, jobs, plans
from manta.api.security.rate_limits import CallerLimits
from manta.api.threads import LONG_READS
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.step_traces.reading import TraceReader
from manta.service.store import generations
from manta.service.store import plans as store_plans
from manta.workers.data.roots import DataRoots
from tests.api.conftest import DOCUMENT, FakeControl, NotedExports
from tests.api.support.keys import ADMIN, bearer

SECONDS = 20.0


def test_slow_job_lists_do_not_block_other_requests(service, monkeypatch):
    begun, go_on, page = threading.Semaphore(0), threading.Event(), RenderedPages.page

    def page_later(*arguments, **options):
        begun.release()
        assert go_on.wait(SECONDS)
        return page(*arguments, **options)

    monkeypatch.setattr(RenderedPages, "page", page_later)
    job = service.submit()
    at_once = service.store.database.reads_at_once
    asked = LONG_READS + at_once
    with ThreadPoolExecutor(asked) as pool:
        lists = [pool.submit(service.http.get, "/v1/jobs", timeout=SECONDS) for _ in range(asked)]
        try:
            for _ in range(at_once):
                assert begun.acquire(timeout=SECONDS)
            for path in ("", "/metrics", "/events"):
                assert service.http.get(f"/v1/jobs/{job['id']}{path}", timeout=SECONDS / 2).status_code == 200
            assert not begun.acquire(blocking=False), "the others wait without a thread"
        finally:
            go_on.set()
    assert [[each["id"] for each in answer.result().json()["items"]] for answer in lists] == [[job["id"]]] * asked


AT_ONCE = 50  # more than there are threads for what is short


@pytest.mark.parametrize(
    "ask",
    [
        *("DELETE job", "DELETE checkpoint", "POST export", "POST check", "POST plans", "POST auto"),
        *("POST dry run", "GET picture", "GET budget", "GET trace", "POST weights"),
        *("GET cluster", "POST drain", "DELETE drain", "GET waits", "GET stack"),
    ],
)
def test_slow_operations_do_not_block_other_requests(service, monkeypatch, ask):
    come, go_on, begin_request = threading.Semaphore(0), threading.Event(), CallerLimits.begin_request

    def stand_still(*_arguments, **_options):
        assert go_on.wait(SECONDS)
        raise ClusterUnavailable(TimeoutError())

    def begin(limits, key_id):
        begin_request(limits, key_id)
        come.release()

    job = service.submit()
    for owner, name in ((FakeControl, "delete"), (FakeControl, "delete_checkpoint"), (FakeControl, "check_cluster"),
                        *((FakeControl, name) for name in ("cluster", "drain", "undrain", "waits", "stack")),
                        (NotedExports, "begin"), (plans, "read_request"), (jobs, "decide"),
                        (jobs, "plan_of_layout"), (planning, "with_shape_of_weights"),
                        (history, "drawn"), (TraceReader, "document"), (TraceReader, "budget")):  # fmt: skip
        monkeypatch.setattr(owner, name, stand_still)
    monkeypatch.setattr(CallerLimits, "begin_request", begin)
    generation = service.store.write(lambda s: generations.begin(s, job["id"], "submitted", False))
    service.store.write(lambda s: store_plans.store(s, job["id"], generation, {"planned": {}}))
    method, path, body = {
        "DELETE job": ("DELETE", f"/v1/jobs/{job['id']}", None),
        "DELETE checkpoint": ("DELETE", f"/v1/jobs/{job['id']}/checkpoints/c", None),
        "POST export": ("POST", f"/v1/jobs/{job['id']}/checkpoints/c/export", {"to": "away"}),
        "POST check": ("POST", "/v1/cluster/check", None),
        "POST plans": ("POST", "/v1/plans", {"model": {}, "cluster": {"current": True}}),
        "POST auto": ("POST", "/v1/jobs", {**DOCUMENT, "parallel": "auto"}),
        "POST dry run": ("POST", "/v1/jobs?dry_run=true", DOCUMENT),
        "POST weights": ("POST", "/v1/jobs", {**DOCUMENT, "model": {"from": "/away"}}),
        "GET cluster": ("GET", "/v1/cluster", None),
        "POST drain": ("POST", "/v1/nodes/abcd/drain", {}),
        "DELETE drain": ("DELETE", "/v1/nodes/abcd/drain", None),
        "GET waits": ("GET", f"/v1/jobs/{job['id']}/waits", None),
        "GET stack": ("GET", f"/v1/jobs/{job['id']}/ranks/0/stack", None),
        "GET picture": ("GET", f"/v1/jobs/{job['id']}/plan/picture", None),
        "GET budget": ("GET", f"/v1/jobs/{job['id']}/budget", None),
        "GET trace": ("GET", f"/v1/jobs/{job['id']}/traces/trace_1", None),
    }[ask]
    client = httpx.Client(
        headers=bearer(ADMIN), timeout=SECONDS, limits=httpx.Limits(max_connections=AT_ONCE), verify=False
    )
    with client, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(client.request, method, service.url + path, json=body) for _ in range(AT_ONCE)]
        try:
            for _ in range(AT_ONCE):
                assert come.acquire(timeout=SECONDS)
            assert service.http.get("/v1/jobs/counts", timeout=SECONDS / 2).status_code == 200
        finally:
            go_on.set()
    assert {answer.result().json()["code"] for answer in asked} == {"cluster_unavailable"}


def test_submission_on_a_hanging_file_system_gets_503_and_one_without_files_succeeds(service, monkeypatch):
    """Of as many that hang as there are threads each keeps one until the file system answers."""
    go_on, gone_on, weights = threading.Event(), threading.Event(), {**DOCUMENT, "model": {"from": "/away"}}

    def stand_still(document, _roots):
        if document["model"].get("from") == "/away":
            go_on.wait(SECONDS)
            gone_on.set()
        return document

    monkeypatch.setattr(planning, "with_shape_of_weights", stand_still)
    with monkeypatch.context() as patch, ThreadPoolExecutor(threads.FILES) as pool:
        patch.setattr(threads, "FILE_SECONDS", 0.01)
        asked = [pool.submit(service.http.post, "/v1/jobs", json=weights) for _ in range(threads.FILES)]
        refused = [each.result() for each in (*asked, pool.submit(service.http.post, "/v1/jobs", json=weights))]
    assert {(each.status_code, each.json()["code"]) for each in refused} == {(503, "files_silent")}
    assert "see that it is mounted" in refused[0].json()["detail"]
    assert service.submit()["state"] == "QUEUED"
    assert not gone_on.is_set(), "one that names no files needs none of those threads"
    go_on.set()
    assert service.http.post("/v1/jobs", json=weights).status_code == 422, "there are threads again"


def test_file_read_that_hangs_keeps_its_thread_until_it_returns(monkeypatch):
    """Else there would be a thread more with each request that names such a file system."""
    monkeypatch.setattr(threads, "FILES", 1)
    go_on = threading.Event()

    async def body():
        files = threads.FileReads()
        with monkeypatch.context() as patch:
            patch.setattr(threads, "FILE_SECONDS", 0.05)
            for read in (lambda: go_on.wait(SECONDS), lambda: "read"):
                with pytest.raises(threads.FilesTimeout):
                    await files.run(read)
        go_on.set()
        async with asyncio.timeout(SECONDS):
            await files._places.acquire()
        files._places.release()
        return await files.run(lambda: "read")

    try:
        assert asyncio.run(body()) == "read"
    finally:
        go_on.set()


def test_file_checks_of_a_spec_run_on_threads_of_their_own(service, monkeypatch, tmp_path):
    asked = []

    def noted(name, answer):
        def ask(*arguments):
            asked.append((name, threading.current_thread().name))
            return answer(*arguments)

        return ask

    monkeypatch.setattr(DataRoots, "problems", noted("roots", lambda *_: []))
    monkeypatch.setattr(jobs, "with_vocabulary", noted("tokenizer", lambda spec: spec))
    monkeypatch.setattr(service.control, "problem_of_data", noted("data", lambda _: "empty"))
    data = {"source": "text", "paths": [str(tmp_path)], "tokenizer": str(tmp_path), "tokenizer_vocabulary": 300}
    answer = service.http.post("/v1/jobs?dry_run=true", json={**DOCUMENT, "data": data})
    assert answer.json()["data_problem"] == "empty"
    assert asked == [(name, "files of a job") for name in ("roots", "tokenizer", "data")]
