"""A job is followed live, and only by those who may."""

import json
import re
import time

import pytest
from playwright.sync_api import expect

from manta.service.identity import DEFAULT_PROJECT, Scope, digest_of, new_key
from manta.service.logs.pages import log_file, log_folder
from manta.service.states import JobState
from manta.service.store import checkpoints, events, jobs, keys, metrics, pauses_and_retries, ranks
from tests.api.ui.browser import Sample, needs_chromium, sign_in
from tests.api.ui.sample import row

pytestmark = needs_chromium


def test_dashboard_follows_a_job_live(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open()
    line = page.locator("tbody tr", has_text="quickstart")
    expect(line).to_contain_text("RUNNING")
    expect(line).to_contain_text("200 / 400")
    last = [row(step, 0.0) for step in range(181, 201)]
    mean = 20 * 2048 / sum(each["step_seconds"] for each in last)
    loss, rate = f"{last[-1]['loss']:.4f}", f"{mean:,.0f}"
    for column, text in (("tokens-s", rate), ("mfu", f"{mean / 26000:.1%}"), ("layout", "2 × 2 × 2")):
        expect(line.locator(f".c-{column}")).to_have_text(text)
    expect(line.get_by_text("1 restart")).to_be_visible()
    expect(line.locator(".c-loss .number")).to_have_text(loss)
    expect(page.locator("tbody tr").first).to_contain_text("wide")
    expect(page.get_by_text("1 node, 8 of 16 slots free")).to_be_visible()

    line.get_by_role("link").click()
    expect(page).to_have_title("quickstart – Manta")
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50.0")
    for label, text in (("Train loss", loss), ("Tokens/s", rate), ("Layout", "2 × 2 × 2"), ("Restarts", "1")):
        expect(page.locator(".figure", has_text=label).locator(".value")).to_have_text(text)
    expect(page.get_by_role("img", name="Loss. train")).to_be_visible()
    expect(page.get_by_text("8 ranks on 1 node: 8 running")).to_be_visible()
    expect(page.locator(".events tbody tr").first).to_contain_text("RECOVERING -> RUNNING")
    expect(page.locator(".ledger-name", has_text="compute")).to_be_visible()
    expect(page.locator(".recoveries tbody tr")).to_contain_text("rank 5 was killed by signal 9")
    expect(page.locator(".recoveries tbody tr")).to_contain_text("1 of 8")

    page.evaluate("window.sameDocument = true")
    _commit(followed, 201)
    expect(page.get_by_text("step 201 of 400")).to_be_visible()
    _commit(followed, 202, loss=float("nan"))
    expect(page.locator(".figure", has_text="Train loss")).to_contain_text("nan")
    expect(page.locator(".attention")).to_contain_text("The loss of step 202 is nan")
    followed.store.write(lambda session: ranks.set_state(session, followed.job, 2, 5, "exited"))
    expect(page.locator(".attention")).to_contain_text("1 rank has exited: 5.")
    expect(page.get_by_text("7 running, 1 exited")).to_be_visible()
    followed.store.write(lambda session: ranks.set_state(session, followed.job, 2, 5, "running"))
    expect(page.get_by_text("8 ranks on 1 node: 8 running")).to_be_visible()

    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("dialog")).to_contain_text("newest complete checkpoint is of step 150")
    expect(page.get_by_role("dialog")).to_contain_text("52 steps since then are lost")
    page.get_by_role("button", name="Keep running").click()
    expect(page.locator("h1 + .badge")).to_have_text("RUNNING")
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("h1 + .badge")).to_have_text("CANCELLING")
    followed.store.write(lambda session: jobs.transition(session, followed.job, JobState.CANCELLED))
    expect(page.locator("h1 + .badge")).to_have_text("CANCELLED")
    expect(page.get_by_role("button", name="Cancel job")).to_be_hidden()
    happened = len(followed.store.query(events.page, followed.job).items)
    page.get_by_role("link", name="History", exact=True).click()
    expect(page.locator(".events tbody tr")).to_have_count(happened)
    assert page.evaluate("window.sameDocument"), "the page was never loaded again"
    assert viewer.complaints.said == []


def test_dashboard_pauses_resumes_retries_and_renames_jobs(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open()
    page.get_by_label("Filter by state").select_option("FAILED")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page).to_have_url(re.compile("state=FAILED$"))  # what is looked at can be shared
    page.locator("tbody tr").get_by_role("link").click()
    expect(page.locator(".why")).to_contain_text("no such file or directory")
    frames = "\n".join(f'  File "layer.py", line {line}, in forward' for line in range(60))
    why = f"rank 1 failed, twice\nTraceback (most recent call last):\n{frames}\nValueError: 7"
    followed.store.write(lambda session: setattr(jobs.get(session, followed.others["bad-data"]), "message", why))
    page.reload()
    printed = page.get_by_role("region", name="What was printed")
    expect(printed).to_contain_text("ValueError: 7")
    expect(page.locator(".why")).to_have_text("rank 1 failed, twice")
    assert printed.evaluate("it => it.scrollTop > 0 && it.scrollTop + it.clientHeight >= it.scrollHeight - 1")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")
    expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("leaves the queue")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.locator("h1 + .badge")).to_have_text("PAUSED")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Name").fill("better-name")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("h1")).to_have_text("better-name")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Name").fill("")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".notice")).to_contain_text("name")
    expect(page.locator("h1")).to_have_text("better-name")
    page.locator(".notice").get_by_role("button", name="Dismiss").click()
    expect(page.locator(".notice")).to_have_count(0)


def test_ticked_jobs_are_paused_and_cancelled_together(followed, browser):
    page = sign_in(browser, followed, followed.link).open()
    for name in ("quickstart", "tiny-llama", "wide"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Pause 2").click()
    expect(page.get_by_role("dialog")).to_contain_text("quickstart")
    expect(page.get_by_role("dialog")).not_to_contain_text("tiny-llama")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.locator("tbody tr", has_text="wide")).to_contain_text("PAUSED")
    expect(page.locator("tbody tr", has_text="quickstart")).to_contain_text("PAUSING")
    page.get_by_role("button", name="Cancel 2").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("tbody tr", has_text="wide")).to_contain_text("CANCELLED")
    expect(page.get_by_role("button", name="Pause 2")).to_be_hidden()


def test_job_list_keeps_its_columns_and_offers_to_clear_its_filters(followed, browser):
    page = sign_in(browser, followed, followed.link).open("?search=nothing")
    expect(page.get_by_text("No job matches.")).to_be_visible()
    page.get_by_role("button", name="Clear filters").click()
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("th.c-mfu")).to_be_hidden()
    page.locator(".chooser summary").click()
    page.get_by_role("checkbox", name="MFU").check()
    page.reload()
    expect(page.locator("th.c-mfu")).to_be_visible()


def test_failed_job_shows_the_end_of_its_log_instead_of_empty_charts(followed, browser, tmp_path):
    job = followed.others["bad-data"]
    entry = {"time": time.time(), "rank": 0, "generation": 1, "stream": "stderr", "text": "DataError: /data/books"}
    log_folder(tmp_path, job).mkdir(parents=True)
    log_file(log_folder(tmp_path, job), 0).write_text(json.dumps(entry) + "\n")
    page = sign_in(browser, followed, followed.link).open(f"jobs/{job}")
    expect(page.get_by_role("log", name="End of the log")).to_have_text("[0] DataError: /data/books")
    expect(page.get_by_role("region", name="Loss")).to_be_hidden()
    expect(page.locator(".figure:visible")).to_contain_text(["Restarts", "Layout"])
    page.get_by_role("link", name="the whole log").click()
    expect(page).to_have_url(re.compile("logs$"))


def test_jobs_are_resized_and_deleted_and_nodes_drained(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open(f"jobs/{followed.job}")
    page.get_by_role("button", name="Resize").click()
    expect(page.get_by_role("dialog")).to_contain_text("may have 1 to 2")
    page.get_by_role("dialog").get_by_label("Replicas").first.fill("1")
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    expect(page.locator(".events tbody tr").first).to_contain_text("resize")
    page.get_by_role("button", name="Resize").click()
    page.get_by_role("dialog").get_by_label("Replicas").first.fill("7")
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    expect(page.locator("dialog :invalid").last).to_have_value("7")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)

    page.goto(followed.page(f"jobs/{followed.others['tiny-llama']}"))
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete permanently").click()
    expect(page).to_have_title("Jobs – Manta")
    expect(page.locator("tbody tr", has_text="tiny-llama")).to_have_count(0)

    page.goto(followed.page("cluster"))
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_role("dialog")).to_contain_text("No new ranks are placed on 127.0.0.1")
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.locator(".badge", has_text="draining")).to_be_visible()
    page.get_by_role("button", name="Use again").click()
    expect(page.locator(".badge", has_text="alive")).to_be_visible()
    expect(page.get_by_role("button", name="Drain")).to_be_visible()
    page.get_by_role("button", name="Check ports").click()
    expect(page.locator(".notice")).to_contain_text("All ports are open: 4 connections between 1 node.")


def test_checkpoints_are_deleted_with_a_warning_for_the_newest(followed, browser):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/checkpoints")
    lines = page.get_by_role("table", name="Checkpoints", exact=True).locator("tbody tr")
    lines.nth(1).get_by_role("button", name="delete").click()
    expect(page.get_by_role("dialog")).not_to_contain_text("It is the newest")
    page.get_by_role("button", name="Delete checkpoint").click()
    expect(lines).to_have_count(2)
    expect(page.get_by_text("1 deleted checkpoint")).to_be_visible()
    lines.nth(0).get_by_role("button", name="delete").click()
    expect(page.get_by_role("dialog")).to_contain_text("It is the newest")
    page.get_by_role("button", name="Delete checkpoint").click()
    expect(lines).to_have_count(1)
    lines.nth(0).get_by_role("button", name="export").click()
    expect(page.get_by_role("dialog")).to_contain_text("Export the weights of step 50")
    expect(page.get_by_role("dialog").get_by_label("Folder")).to_have_value("quickstart-step-50")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_newest_checkpoint_of_a_job_that_went_back_is_warned_about_with_its_size(followed, browser):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/checkpoints")
    saving = followed.store.write(lambda session: checkpoints.begin(session, followed.job, 3, 30, "/somewhere/30").id)
    line = page.locator(".checkpoints tbody tr", has_text="/somewhere/30")
    expect(line).to_contain_text("saving")
    followed.store.write(lambda session: checkpoints.complete(session, saving, 7 * 2**20))
    line.get_by_role("button", name="delete").click()
    expect(page.get_by_role("dialog")).to_contain_text("It is the newest")
    expect(page.get_by_role("dialog")).to_contain_text("Step 30, 7.00 MiB.")


def test_dashboard_hides_actions_from_a_read_only_viewer_who_can_sign_out(viewed, browser):
    viewer = sign_in(browser, viewed, viewed.of_reader)
    page = viewer.open(f"jobs/{viewed.job}")
    expect(page.locator(".account-name")).to_have_text("viewer")
    expect(page.get_by_role("link", name="Submit job")).to_be_hidden()
    expect(page.locator("h1 + .badge")).to_have_text("RUNNING")
    for name in ("Cancel job", "Pause", "Resume", "Retry", "Edit"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    (cookie,) = viewer.context.cookies()

    page.locator(".account-name").click()
    expect(page.locator(".account-about")).to_contain_text("viewer (read)")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("This browser is not signed in.")).to_be_visible()
    viewer.context.add_cookies([cookie])
    answer = page.goto(viewed.page(f"jobs/{viewed.job}"))
    assert answer.status == 401, "what the browser had is good no more"


def test_login_link_on_a_page_of_another_site_signs_in(viewed, browser):
    page = browser.new_page()
    page.route("http://elsewhere.test/", lambda route: route.fulfill(
        content_type="text/html", body=f'<a href="{viewed.new_link()}">the dashboard</a>'))  # fmt: skip
    page.goto("http://elsewhere.test/")
    page.get_by_role("link").click()
    expect(page).to_have_title("Jobs – Manta")


def test_dashboard_shows_each_viewer_only_what_their_key_allows(followed, browser):
    nobody = browser.new_page()
    assert nobody.goto(followed.page(f"jobs/{followed.job}")).status == 401
    expect(nobody.get_by_text("This browser is not signed in.")).to_be_visible()
    me = sign_in(browser, followed, followed.link)
    mine = me.open()
    expect(mine.locator("tbody tr", has_text="quickstart")).to_be_visible()
    assert nobody.goto(followed.link).status == 401, "a link is good once"
    expect(nobody.get_by_text("This browser is not signed in.")).to_be_visible()
    (cookie,) = me.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert cookie["value"] not in mine.content() and cookie["value"] not in mine.evaluate("document.cookie")

    theirs = sign_in(browser, followed, followed.of_others).open()
    expect(theirs.get_by_text("No jobs yet")).to_be_visible()
    theirs.goto(followed.page(f"jobs/{followed.job}"))
    expect(theirs.get_by_text("There is no such job.")).to_be_visible()
    assert "quickstart" not in theirs.content()

    mine.goto(followed.page(f"jobs/{followed.job}"))
    expect(mine.get_by_role("button", name="Cancel job")).to_be_visible()
    followed.store.write(lambda session: [keys.revoke(session, None, key.id) for key in keys.page(session, None).items])
    expect(mine.locator(".banner")).to_contain_text("send a valid key")
    assert mine.goto(followed.page()).status == 401


def test_dashboard_shows_a_lost_service_and_recovers_when_it_returns(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open(f"jobs/{followed.job}")
    expect(page.get_by_text("step 200 of 400")).to_be_visible()
    viewer.context.set_offline(True)
    expect(page.locator(".banner")).to_have_text("Cannot reach the service, retrying")
    expect(page.get_by_text("step 200 of 400")).to_be_visible()
    viewer.context.set_offline(False)
    _commit(followed, 201)
    expect(page.get_by_text("step 201 of 400")).to_be_visible()
    expect(page.locator(".banner")).to_be_hidden()


CUT = """() => { window.fetch = async () => new Response(new ReadableStream({
    pull(controller) { controller.error(new TypeError("cut")); } })); }"""
FOREIGN = "() => { window.fetch = async () => new Response('<html>a proxy</html>'); }"
BACK = "() => { window.fetch = window.kept; }"


@pytest.mark.parametrize("trouble", [CUT, FOREIGN], ids=["an answer that breaks off", "somebody else's answer"])
def test_dashboard_recovers_from_broken_or_foreign_answers(followed, browser, trouble):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}")
    expect(page.get_by_text("step 200 of 400")).to_be_visible()
    page.evaluate("() => { window.kept = window.fetch; }")
    page.evaluate(trouble)
    expect(page.locator(".banner")).to_contain_text("retrying")
    page.evaluate(BACK)
    _commit(followed, 201)
    expect(page.get_by_text("step 201 of 400")).to_be_visible()
    expect(page.locator(".banner")).to_be_hidden()


def test_dashboard_reloads_when_its_files_belong_to_a_former_release(viewed, browser):
    viewer = sign_in(browser, viewed, viewed.new_link())
    page = viewer.open()
    page.route("**/pages/queue.js", lambda route: route.fulfill(status=404), times=1)
    page.get_by_role("link", name="Queue").click()
    expect(page).to_have_title("Queue – Manta")
    expect(page).to_have_url(viewed.page("queue"))
    page.route("**/parts/recovery_table.js", lambda route: route.abort(), times=1)  # the network has changed
    page.goto(viewed.page(f"jobs/{viewed.job}"))
    expect(page.locator(".tab-body")).to_be_visible()
    assert not any("imported module" in said for said in viewer.complaints.said)


def test_dashboard_follows_a_failed_job_on_after_a_retry(followed, browser):
    job = followed.others["bad-data"]
    page = sign_in(browser, followed, followed.link).open(f"jobs/{job}")
    expect(page.locator("h1 + .badge")).to_have_text("FAILED")
    followed.store.write(lambda session: pauses_and_retries.request_retry(session, job))
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")


def test_text_selected_in_a_log_stays_selected_while_lines_arrive(followed, browser, tmp_path):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/logs")
    line = page.get_by_role("log").locator(".log-line").last
    line.wait_for()
    line.evaluate("(element) => { getSelection().selectAllChildren(element); }")
    marked = page.evaluate("() => String(getSelection())")
    _print(followed, tmp_path, "one more line")
    expect(page.get_by_role("log")).to_contain_text("one more line")
    assert marked and page.evaluate("() => String(getSelection())") == marked


HELD = """() => { const real = window.fetch; window.fetch = async (...asked) => {
    const answer = await real(...asked), text = await answer.clone().text();
    if (text.includes("of all ranks")) await new Promise((go) => { window.go = go; });
    return answer; }; }"""


def test_log_page_shows_lines_of_the_newly_chosen_rank_only(followed, browser, tmp_path):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/logs")
    lines = page.get_by_role("log").locator(".log-line")
    expect(lines.filter(has_text="[7]").first).to_be_visible()
    page.evaluate(HELD)
    _print(followed, tmp_path, "the last one of all ranks")
    page.wait_for_function("() => window.go")
    page.get_by_label("Rank of the log").select_option("3")
    with page.expect_response(lambda answer: "/logs?rank=3" in answer.url):
        page.evaluate("() => window.go()")
    expect(lines.first).to_contain_text("[3]")
    expect(lines).to_have_count(31)


def test_log_page_drops_its_oldest_lines_as_a_log_grows(followed, browser, tmp_path):
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/logs")
    lines = page.get_by_role("log").locator(".log-line")
    expect(lines).to_have_count(8 * 31)
    _print(followed, tmp_path, *(f"line {number}" for number in range(2001)))
    expect(lines.last).to_contain_text("line 2000")
    expect(page.get_by_role("log")).not_to_contain_text("step 1:")


def _print(sample: Sample, home, *texts: str) -> None:
    """As rank 0 does."""
    entry = {"time": time.time() + 60, "rank": 0, "generation": 2, "stream": "stdout"}
    with log_file(log_folder(home, sample.job), 0).open("a") as file:
        file.write("".join(json.dumps({**entry, "text": text}) + "\n" for text in texts))


def _commit(sample: Sample, step: int, loss: float = 1.5) -> None:
    row = {"step": step, "loss": loss, "time": time.time(), "tokens_per_second": 4000.0, "step_seconds": 0.5}
    sample.store.write(lambda session: metrics.record(session, sample.job, 2, 0, step, [row]))


def test_key_pasted_on_the_sign_in_page_opens_the_dashboard(viewed, browser):
    secret = new_key()
    viewed.store.write(lambda session: keys.create(session, digest_of(secret), "pasted", Scope.READ, DEFAULT_PROJECT))
    page = browser.new_page()
    page.goto(viewed.page("queue"))
    for typed, wanted in (("manta_wrong", "unknown, expired or revoked"), ("ключ", "characters that no key has")):
        page.get_by_label("API key").fill(typed)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("status")).to_contain_text(wanted)
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_title("Jobs – Manta")


def test_chosen_theme_is_kept_by_the_browser_whatever_the_system_prefers(viewed, browser):
    page = sign_in(browser, viewed, viewed.new_link(), color_scheme="light").open("queue")
    ground = "getComputedStyle(document.documentElement).getPropertyValue('--ground')"
    light = page.evaluate(ground)
    page.locator(".account-name").click()
    page.get_by_label("Theme").select_option("dark")
    page.wait_for_function(f"{ground} !== '{light}'")
    page.reload()
    page.wait_for_function(f"{ground} !== '{light}'")
    page.locator(".account-name").click()
    page.get_by_label("Theme").select_option("system")
    page.wait_for_function(f"{ground} === '{light}'")


def test_link_that_is_followed_offline_says_so_and_opens_later(viewed, browser):
    viewer = sign_in(browser, viewed, viewed.new_link())
    page = viewer.open()
    expect(page.locator("tbody tr", has_text="quickstart")).to_be_visible()
    viewer.context.set_offline(True)
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator(".notice")).to_contain_text("The page opens as soon as it answers.")
    viewer.context.set_offline(False)
    expect(page).to_have_title("Cluster – Manta")
