"""The dashboard in a real browser, against a real server with a job that was restarted once."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from service.states import JobState
from service.store import Store, events, jobs, keys, metrics, ranks
from tests.api.ui.sample import row

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run", "--disable-quic"]  # fmt: skip
SERVER = Path(__file__).with_name("sample.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SERVER.parents[3])}
SECONDS = 20_000  # milliseconds; machines that run tests are slow at times

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the system's Chromium")


@dataclass
class Sample:
    """The server, and the database behind it."""

    url: str
    job: str
    link: str
    """Signs in whoever may see everything."""
    of_others: str
    """Signs in somebody of another project."""
    of_reader: str
    """Signs in whoever may see everything and change nothing."""
    store: Store


@dataclass
class Complaints:
    """What a browser should not have to say."""

    said: list[str] = field(default_factory=list)

    def watch(self, page: Page, url: str) -> None:
        page.on("console", lambda message: message.type in ("error", "warning") and self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("requestfailed", lambda request: self.said.append(f"failed: {request.url}"))
        page.on("response", lambda answer: answer.status >= 400 and self.said.append(f"{answer.status}: {answer.url}"))
        page.on("request", lambda request: self._check(request.url, url))

    def _check(self, address: str, url: str) -> None:
        if not address.startswith((url, url.replace("http", "ws", 1), "data:", "blob:")):
            self.said.append(f"foreign: {address}")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Sample]:
    """The sample server; in a process of its own, since NiceGUI has one app a process."""
    command = [sys.executable, str(SERVER), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    store = Store(f"sqlite:///{folder}/manta.db")
    try:
        assert process.stdout is not None
        yield Sample(**json.loads(process.stdout.readline()), store=store)
        process.terminate()
        process.wait(20)
    finally:
        process.kill()
        store.close()


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    """One for those who only look; who comes last revokes its keys."""
    with served(tmp_path_factory.mktemp("viewed")) as sample:
        yield sample


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Knows nothing of the tests before."""
    yield chromium
    for context in chromium.contexts:
        context.close()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Sample]:
    """One whose job goes on, and ends."""
    with served(tmp_path) as sample:
        yield sample


def test_a_job_is_followed_live(followed, browser):
    sample = followed
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(SECONDS)
    expect.set_options(timeout=SECONDS)
    complaints = Complaints()
    complaints.watch(page, sample.url)

    page.goto(sample.link)
    line = page.locator("tbody tr", has_text="quickstart")
    expect(line).to_contain_text("RUNNING")
    expect(line).to_contain_text("200 / 400")
    shown = row(200, 0.0)
    loss, rate = f"{shown['loss']:.4f}", f"{shown['tokens_per_second']:,.0f}"
    for column, text in (("loss", loss), ("tokens-s", rate), ("mfu", f"{shown['mfu_full']:.1%}"), ("restarts", "1")):
        expect(line.locator(f".c-{column}")).to_have_text(text)
    expect(page.locator("tbody tr").first).to_contain_text("wide")
    expect(page.get_by_text("1 node, 8 of 16 slots free")).to_be_visible()

    line.get_by_role("link").click()
    expect(page).to_have_title("quickstart – Manta")
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50.0")
    for chart in (".loss-chart canvas", ".throughput-chart canvas"):
        expect(page.locator(chart).first).to_be_visible()
    expect(page.locator(".rank")).to_have_count(8)
    expect(page.locator(".rank").first).to_contain_text("stage 0, tensor 0")
    expect(page.locator(".rank").nth(1)).to_contain_text("stage 1, tensor 0")
    expect(page.locator(".rank").nth(1)).to_contain_text("pid 4134")
    expect(page.locator(".replica").nth(1).locator(".rank")).to_have_count(4)
    for label, text in (("Train loss", loss), ("Tokens/s", rate), ("Generation", "2"), ("Ranks", "2 × 2 × 2")):
        expect(page.locator(".figure", has_text=label).locator(".value")).to_have_text(text)
    expect(page.locator(".events tbody tr").first).to_contain_text("RECOVERING -> RUNNING")
    expect(page.locator(".checkpoints tbody tr")).to_have_count(3)
    expect(page.locator(".checkpoints tbody tr").first.locator("td").nth(1)).to_have_text("complete")
    expect(page.locator(".ledger-name", has_text="compute")).to_be_visible()
    expect(page.locator(".ledger-part")).to_have_count(7)
    expect(page.locator(".recoveries tbody tr")).to_contain_text("rank 5 was killed by signal 9")
    expect(page.locator(".recoveries tbody tr")).to_contain_text("1 of 8")
    expect(page.locator(".log-text")).to_contain_text("[7] step 146")

    page.evaluate("window.sameDocument = true")
    _commit(sample, 201)
    expect(page.get_by_text("step 201 of 400")).to_be_visible()
    _commit(sample, 202, loss=float("nan"))
    expect(page.locator(".figure", has_text="Train loss")).to_contain_text("nan")
    sample.store.write(lambda session: ranks.set_state(session, sample.job, 2, 5, "exited"))
    expect(page.locator(".rank.tone-bad")).to_contain_text("rank 5")
    page.get_by_label("Rank of the log").click()
    page.get_by_role("option", name="Rank 3").click()
    expect(page.locator(".log-text")).not_to_contain_text("[")

    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("h1 + .badge")).to_have_text("CANCELLING")
    sample.store.write(lambda session: jobs.transition(session, sample.job, JobState.CANCELLED))
    expect(page.locator("h1 + .badge")).to_have_text("CANCELLED")
    expect(page.get_by_role("button", name="Cancel job")).to_be_hidden()
    with sample.store.read() as session:
        happened = len(events.page(session, sample.job).items)
    expect(page.locator(".events tbody tr")).to_have_count(happened)
    assert page.evaluate("window.sameDocument"), "the page was never loaded again"

    page.get_by_role("link", name="Jobs").click()
    page.get_by_label("Filter by state").click()
    page.get_by_role("option", name="FAILED").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("bad-data")
    page.locator("tbody tr").get_by_role("link").click()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")
    expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("h1 + .badge")).to_have_text("PAUSED")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")
    assert complaints.said == []


def test_who_may_only_read_is_offered_nothing_else_and_signs_out(viewed, browser):
    sample = viewed
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(SECONDS)
    expect.set_options(timeout=SECONDS)
    page.goto(sample.of_reader)
    expect(page.locator(".viewer")).to_have_text("viewer")
    page.locator("tbody tr", has_text="quickstart").get_by_role("link").click()
    expect(page.locator("h1 + .badge")).to_have_text("RUNNING")
    for name in ("Cancel job", "Pause", "Resume", "Retry"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    (cookie,) = context.cookies()

    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("This browser is not signed in.")).to_be_visible()
    context.add_cookies([cookie])
    assert page.goto(f"{sample.url}/ui/jobs/{sample.job}").status == 401, "what the browser had is good no more"


def test_two_viewers_see_what_their_keys_may_see(viewed, browser):
    sample = viewed
    first, other = browser.new_context(), browser.new_context()
    mine, theirs, nobody = first.new_page(), other.new_page(), browser.new_context().new_page()
    for page in (mine, theirs, nobody):
        page.set_default_timeout(SECONDS)
    expect.set_options(timeout=SECONDS)

    assert nobody.goto(f"{sample.url}/ui/jobs/{sample.job}").status == 401
    expect(nobody.get_by_text("This browser is not signed in.")).to_be_visible()
    mine.goto(sample.link)
    expect(mine.locator("tbody tr", has_text="quickstart")).to_be_visible()
    assert nobody.goto(sample.link).status == 404, "a link is good once"
    (cookie,) = first.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert cookie["value"] not in mine.content() and cookie["value"] not in mine.evaluate("document.cookie")

    theirs.goto(sample.of_others)
    expect(theirs.get_by_text("No jobs yet")).to_be_visible()
    theirs.goto(f"{sample.url}/ui/jobs/{sample.job}")
    expect(theirs.get_by_text("There is no such job.")).to_be_visible()
    assert "quickstart" not in theirs.content()

    mine.goto(f"{sample.url}/ui/jobs/{sample.job}")
    expect(mine.get_by_role("button", name="Cancel job")).to_be_visible()
    sample.store.write(lambda session: [keys.revoke(session, None, key.id) for key in keys.page(session, None).items])
    expect(mine.locator(".banner")).to_contain_text("send a key that is good")
    assert mine.goto(f"{sample.url}/ui/").status == 401


def _commit(sample: Sample, step: int, loss: float = 1.5) -> None:
    row = {"step": step, "loss": loss, "time": time.time(), "tokens_per_second": 4000.0, "step_seconds": 0.5}
    sample.store.write(lambda session: metrics.record(session, sample.job, 2, 0, step, [row]))
