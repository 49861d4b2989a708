"""A real Chromium, a real server with sample jobs, and what a browser should never have to say."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from manta.service.store import Store
from tests.api.ui.sample import SampleServer, one_time_link

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run", "--disable-quic"]  # fmt: skip
MILLISECONDS = 20_000  # machines that run tests are slow at times


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the system's Chromium")


@dataclass
class Sample:
    """The server, and the database behind it."""

    url: str
    job: str
    """The one that runs and was restarted once."""
    others: dict[str, str]
    """Ids of the other jobs, by name."""
    link: str
    """Signs in whoever may see everything."""
    of_others: str
    """Signs in somebody of another project."""
    of_reader: str
    """Signs in whoever may see everything and change nothing."""
    store: Store

    def new_link(self) -> str:
        """Another link that signs in whoever may see everything: each is good once."""
        return f"{self.url}{one_time_link(self.store)}"

    def page(self, path: str = "") -> str:
        """Address of a page of the dashboard."""
        return f"{self.url}/ui/{path}"


@dataclass
class Complaints:
    """What a browser should not have to say."""

    said: list[str] = field(default_factory=list)

    def watch(self, page: Page, url: str) -> None:
        """Note errors and warnings of `page`, answers that are errors, and requests that leave `url`."""
        page.on("console", lambda message: self._hear(message.type, message.text, message.location["url"]))
        page.on("pageerror", lambda error: self.said.append(f"{error}\n{error.stack}"))
        page.on("request", lambda request: self._check(request.url, url))

    def _hear(self, kind: str, text: str, address: str) -> None:
        if kind in ("error", "warning"):
            self.said.append(f"{text} {address}")

    def _check(self, address: str, url: str) -> None:
        if not address.startswith((url, "data:", "blob:")):
            self.said.append(f"foreign: {address}")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Sample]:
    """The sample server, on a thread."""
    server = SampleServer(folder)
    thread = threading.Thread(target=server.run, name="sample server")
    thread.start()
    try:
        yield Sample(**server.about, store=server.store)
    finally:
        server.stop()
        thread.join(20)


@dataclass
class Viewer:
    """Somebody at a browser who is signed in."""

    sample: Sample
    context: BrowserContext
    complaints: Complaints

    def open(self, path: str = "") -> Page:
        """A page of the dashboard, in a tab of its own."""
        page = self.context.new_page()
        self.complaints.watch(page, self.sample.url)
        page.goto(self.sample.page(path))
        return page


def sign_in(browser: Browser, sample: Sample, link: str, **options: object) -> Viewer:
    """Whoever opens `link`: asked for as a page would be, but without loading the dashboard, to which it leads on."""
    context = browser.new_context(viewport={"width": 1360, "height": 900}, **options)  # type: ignore[arg-type]
    context.set_default_timeout(MILLISECONDS)
    expect.set_options(timeout=MILLISECONDS)
    assert context.request.get(link).ok
    return Viewer(sample, context, Complaints())
