"""The viewers of the dashboard's benchmark ask what a browser asks, as often."""

import asyncio
import re
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import sync_playwright

from benchmarks.support.dashboard_viewers import SLOW_TURN, Page
from tests.api.ui.browser import ARGUMENTS, CHROMIUM, MILLISECONDS, needs_chromium, served, sign_in

TURNS = 2 * SLOW_TURN


def kind_of(address):
    """What is asked for, whatever has been read before."""
    parts = urlsplit(str(address))
    names = re.search(r"names=([\w,%]+)", parts.query)
    return re.sub(r"^/v1/jobs/\w+", "", parts.path), frozenset(re.split(r",|%2C", names.group(1))) if names else None


def asked_by_a_browser(sample):
    """Over TURNS turns, but for validation losses, which are read once for so many steps; and its cookie."""
    asked = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        viewer = sign_in(chromium, sample, sample.link)
        page = viewer.context.new_page()
        about = lambda request: f"/v1/jobs/{sample.job}" in request.url  # noqa: E731
        page.on("request", lambda request: about(request) and asked.append(kind_of(request.url)))
        page.goto(sample.page(f"jobs/{sample.job}"), wait_until="commit")
        while sum(path == "" for path, _ in asked) <= TURNS:
            page.wait_for_event("request", predicate=about, timeout=MILLISECONDS)
        (cookie,) = viewer.context.cookies()
        chromium.close()
    over = [place for place, (path, _) in enumerate(asked) if path == ""][TURNS]
    kinds = [kind for kind in asked[:over] if "validation_loss" not in (kind[1] or ())]
    return Counter(kinds), f"{cookie['name']}={cookie['value']}"


async def asked_by_a_viewer(url, cookie, job):
    asked = []

    async def note(request):
        asked.append(kind_of(request.url))

    async with httpx.AsyncClient(base_url=url, headers={"Cookie": cookie}, event_hooks={"request": [note]}) as client:
        page = Page(client, job)
        for _ in range(TURNS):
            await page.refresh()
    return Counter(asked)


@pytest.mark.soak  # as of all benchmarks in small; the pages themselves: tests/api/ui
@needs_chromium
def test_simulated_dashboard_viewer_sends_the_requests_of_a_browser(tmp_path):
    with served(tmp_path) as sample:
        browser, cookie = asked_by_a_browser(sample)
        assert asyncio.run(asked_by_a_viewer(sample.url, cookie, sample.job)) == browser
