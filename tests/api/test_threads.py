"""What takes long holds up nothing that is short."""

import threading
from concurrent.futures import ThreadPoolExecutor

from api.rendered_pages import RenderedPages
from api.threads import LONG_READS

SECONDS = 20.0


def test_lists_of_jobs_that_stand_still_hold_up_no_other_request(service, monkeypatch):
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
