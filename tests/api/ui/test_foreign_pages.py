"""Pages that are not the dashboard, open in a browser that is signed in, change nothing: a real Chromium sends the
cookie along with what they ask for, to every port of the host."""

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame, Page

from manta.service.store import jobs
from tests.api.ui.browser import ARGUMENTS, CHROMIUM, MILLISECONDS, Sample, needs_chromium, sign_in

pytestmark = needs_chromium

ATTACK = """([url, job]) => {
    const cancel = `${url}/v1/jobs/${job}/cancel`;
    fetch(cancel, { method: "POST", mode: "no-cors", credentials: "include" }).catch(() => null);
    fetch(cancel, { method: "POST", credentials: "include", headers: { "Manta-Rest": "1" } }).catch(() => null);
    navigator.sendBeacon(cancel);
    document.body.innerHTML = `<iframe name="answer"></iframe><form method="post" target="answer"></form>`;
    Object.assign(document.forms[0], { action: cancel }).submit();
}"""
MANIFEST = {
    "manifest_version": 3,
    "name": "foreign",
    "version": "1",
    "host_permissions": ["http://127.0.0.1/*"],
    "background": {"service_worker": "idle.js"},
}


@contextlib.contextmanager
def empty_pages() -> Iterator[int]:
    """A web server of somebody else on this machine; its port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<body></body>")

        def log_message(self, *_arguments: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def attack(page: Page, frame: Page | Frame, sample: Sample) -> None:
    """Try everything in `frame` of `page`, and return when the browser has done it."""
    tried: set[str] = set()
    for event in ("requestfinished", "requestfailed"):
        page.on(event, lambda request: tried.add(request.resource_type) if request.method == "POST" else None)
    frame.evaluate(ATTACK, [sample.url, sample.job])
    deadline = time.monotonic() + MILLISECONDS / 1000
    while not {"fetch", "document"} <= tried:
        assert time.monotonic() < deadline, tried
        page.wait_for_timeout(50)


def state(sample: Sample) -> str:
    return sample.store.query(jobs.get, sample.job).state


@pytest.mark.parametrize("where", ["another port", "another name", "a file", "a frame without an origin"])
def test_foreign_page_cannot_cancel_a_job_of_a_signed_in_browser(followed, browser: Browser, tmp_path: Path, where):
    page = sign_in(browser, followed, followed.link).context.new_page()
    file = tmp_path / "page.html"
    file.write_text("<body></body>")
    with empty_pages() as port:
        pages = {"another name": f"http://localhost:{port}/", "a file": file.as_uri()}
        page.goto(pages.get(where, f"http://127.0.0.1:{port}/"))
        frame: Page | Frame = page
        if where == "a frame without an origin":
            page.set_content('<iframe sandbox="allow-scripts allow-forms" srcdoc="<body></body>"></iframe>')
            frame = page.frames[1]
        attack(page, frame, followed)
    assert state(followed) == "RUNNING"


def test_foreign_page_cannot_sign_a_browser_in(followed, browser: Browser):
    """Else what its user does from then on would be seen by whoever has the key behind the link."""
    context = browser.new_context()
    page = context.new_page()
    with empty_pages() as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.evaluate("link => fetch(link, { mode: 'no-cors', credentials: 'include' })", followed.link)
    assert context.cookies() == []
    assert sign_in(browser, followed, followed.link), "the link is still good"


def test_browser_extension_with_access_cannot_cancel_a_job(followed, browser: Browser, tmp_path: Path):
    """Its requests carry the cookie even where a page's would not."""
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    (folder / "idle.js").write_text("")
    (folder / "page.html").write_text("<body></body>")
    arguments = [*ARGUMENTS, f"--disable-extensions-except={folder}", f"--load-extension={folder}", "--headless=new"]
    context = browser.browser_type.launch_persistent_context(
        tmp_path / "profile", executable_path=CHROMIUM, headless=False, args=arguments, timeout=MILLISECONDS
    )
    try:
        assert context.request.get(followed.link).ok
        worker = context.service_workers[0] if context.service_workers else context.wait_for_event("serviceworker")
        page = context.new_page()
        page.goto(worker.url.replace("idle.js", "page.html"))
        attack(page, page, followed)
    finally:
        context.close()
    assert state(followed) == "RUNNING"
