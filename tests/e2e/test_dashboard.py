"""A service shows its dashboard to who has a key, unless it was told to have none; and on it what becomes of a real
job."""

import json
import re

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

from manta.service.own_files import read_key
from tests.api.ui.browser import ARGUMENTS, CHROMIUM, MILLISECONDS, Complaints, needs_chromium

SLOW_SECONDS = 0.25


def front_page(manta, **headers):
    return httpx.get(f"{manta.url}/ui/", headers=headers, timeout=30)


def test_service_serves_a_dashboard(manta):
    shown = front_page(manta, authorization=f"Bearer {read_key(manta.home)}")
    assert (shown.status_code, "Manta" in shown.text) == (200, True)
    assert front_page(manta).status_code == 401


@pytest.mark.soak  # what is mounted: tests/api/test_server.py
def test_service_told_to_have_no_dashboard_answers_not_found(on_postgres):
    without = front_page(on_postgres, authorization=f"Bearer {read_key(on_postgres.home)}")
    assert (without.status_code, without.json()["code"]) == (404, "not_found")


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def page(chromium, manta):
    """A viewer's page, whose browser must have nothing to complain about."""
    expect.set_options(timeout=3 * MILLISECONDS)
    context = chromium.new_context(viewport={"width": 1360, "height": 900})
    context.set_default_timeout(3 * MILLISECONDS)
    opened, complaints = context.new_page(), Complaints()
    opened.goto(f"{manta.url}{manta.client.link().path}")
    opened.wait_for_url("**/ui/")
    complaints.watch(opened, manta.url)
    yield opened
    context.close()
    assert complaints.said == []


@needs_chromium
def test_killed_rank_turns_red_and_is_green_again_and_its_cost_is_two_clicks_away(manta, kill, page):
    job = manta.submit(manta.spec(steps=10_000))
    manta.leave_room(job)
    manta.until_step(job, 2)
    page.goto(f"{manta.url}/ui/")
    page.locator("tbody tr", has_text=job).get_by_role("link").click()
    page.get_by_role("link", name="Ranks", exact=True).click()
    expect(page.locator(".rank-summary")).to_have_text(re.compile("4 ranks on 1 node: 4 running"))
    kill(manta.pids(job)[1])
    replaced = re.compile(r"4 ranks on 1 node: 4 running(; slow: 0)?; replaced by recoveries: 1\. ")
    expect(page.locator(".rank-summary")).to_have_text(replaced)
    page.get_by_role("link", name="Jobs", exact=True).click()

    page.locator("tbody tr", has_text=job).get_by_role("link").click()  # one
    expect(
        page.get_by_text(re.compile(r"1 recovery took .* from failure to the next step \(.* rank seconds\)"))
    ).to_be_visible()
    page.get_by_role("link", name="all recoveries").click()  # two
    expect(page.locator(".recoveries tbody tr")).to_contain_text("1 of 4")
    expect(page.locator(".recoveries tbody tr")).to_contain_text("detect")
    manta.client.cancel(job)
    expect(page.locator("h1 + .badge")).to_have_text(re.compile("CANCELL"))


@pytest.mark.soak  # its parts: tests/e2e/test_ranks.py, tests/api/ui/test_pages.py, test_modules.py
@needs_chromium
def test_slow_rank_is_found_and_explained_in_three_clicks(manta, page):
    job = manta.submit(manta.spec(steps=10_000))
    manta.until_step(job, 2)
    manta.inject(job, "slow", 1, seconds=SLOW_SECONDS)
    manta.until("the event of the straggler", lambda: manta.events(job, "straggler"))
    page.goto(f"{manta.url}/ui/")
    page.locator("tbody tr", has_text=job).get_by_role("link").click()  # one
    expect(page.locator(".attention")).to_contain_text("Rank 1 slows the others down")
    page.locator(".attention").get_by_role("link", name="look").first.click()  # two
    expect(page.locator(".verdict")).to_contain_text(f"pid {manta.pids(job)[1]}")
    page.get_by_role("table", name="Ranks").get_by_role("button", name="1").click()  # three
    expect(page.locator(".rank-detail")).to_contain_text("straggler")
    page.get_by_role("button", name="Current stack").click()
    expect(page.locator(".stack:visible")).to_contain_text("File")
    manta.client.cancel(job)


@pytest.mark.soak  # its parts: tests/e2e/test_traces.py, tests/api/ui/test_pages.py
@needs_chromium
def test_step_of_a_real_job_is_traced_and_drawn(manta, page):
    job = manta.submit(manta.spec(steps=10_000, layout=(2, 2, 2)))
    manta.leave_room(job)
    manta.until_step(job, 2)
    page.goto(f"{manta.url}/ui/jobs/{job}/step")
    page.get_by_role("button", name="Trace the next step").click()
    lanes = page.get_by_role("img", name="Every action of every rank")
    expect(lanes).to_be_visible()
    expect(page.get_by_text(re.compile("1 step from step .*, schedule 1f1b.*bubble .*%"))).to_be_visible()
    expect(page.get_by_role("img", name="The same step as planned")).to_be_visible()
    expect(page.locator(".budget-row", has_text="ideal compute")).to_be_visible()
    assert _colours(page) > 4, "lanes are drawn, each stage in its own colour"
    lanes.focus()
    page.keyboard.press("+")
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 12)
    with page.expect_download() as download:
        page.get_by_role("link", name="Perfetto").click()
    assert download.value.path().stat().st_size > 1000
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    trace = json.loads(download.value.path().read_text())
    assert [rank["rank"] for rank in trace["ranks"]] == list(range(8)) and trace["state"] == "complete"
    manta.client.cancel(job)


def _colours(page):
    """Of the pixels of the lanes' canvas."""
    return page.evaluate("""() => {
        const canvas = document.querySelector(".lane-canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set();
        for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) seen.add(data.slice(at, at + 3).join());
        return seen.size;
    }""")
