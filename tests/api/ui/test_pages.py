"""Every page of the dashboard: what is on it, what can be done there, and that anybody can use it."""

import re
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from manta.service.store import ranks
from manta.workers.liveness.rank_samples import RankSample, packed
from tests.api.ui.browser import needs_chromium, sign_in
from tests.api.ui.sample import MARKUP

pytestmark = needs_chromium

TABS = ("", "charts", "ranks", "step", "memory", "history", "data", "checkpoints", "logs", "spec")
PAGES = (
    "",
    *(f"jobs/JOB/{tab}".rstrip("/") for tab in TABS),
    *("compare?jobs=JOB,OTHER", "queue", "cluster", "submit", "plan", "access"),
)


def address(sample, page):
    return page.replace("JOB", sample.job).replace("OTHER", sample.others["tiny-llama"])


SOME = ("", "jobs/JOB", "jobs/JOB/ranks", "submit")


@pytest.mark.parametrize(
    ("colours", "pages"),
    [("light", SOME), ("dark", SOME[:2])]
    + [pytest.param(each, PAGES, marks=pytest.mark.soak) for each in ("light", "dark")],
)
def test_dashboard_pages_have_no_serious_accessibility_violations(browser, viewed, colours, pages):
    """By axe's rules, of which none that is serious may be broken."""
    viewer = sign_in(browser, viewed, viewed.new_link(), color_scheme=colours)
    page, axe, broken = viewer.open(), Axe(), []
    for name in pages:
        page.goto(viewed.page(address(viewed, name)))
        expect(page.locator("#main h1")).to_be_visible()
        page.wait_for_load_state("networkidle")
        for rule in axe.run(page).response["violations"]:
            if rule["impact"] in ("serious", "critical"):
                broken.append((name, rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]))
    assert broken == []
    assert viewer.complaints.said == []


def test_dashboard_pages_fit_the_width_of_a_phone(viewer):
    page, wide = viewer.open(), []
    page.set_viewport_size({"width": 390, "height": 800})
    for name in PAGES:
        page.goto(viewer.sample.page(address(viewer.sample, name)))
        expect(page.locator("#main h1")).to_be_visible()
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelector('[aria-label=\"Add a job\"]')?.append(new Option('n'.repeat(100)))")
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(name)
    assert wide == []


def _with_time_left(route):
    """Lets all jobs have 98,765 s to go."""
    answer = route.fetch()
    listed = answer.json()
    listed["items"] = [{**job, "eta_seconds": 98_765.0} for job in listed["items"]]
    route.fulfill(response=answer, json=listed)


def test_dashboard_lists_fit_the_window_with_even_rows(viewer):
    page = viewer.open()
    page.route("**/v1/jobs?*", _with_time_left)
    rows, grid = page.locator(".jobs tbody tr"), page.locator(".scroll", has=page.locator(".jobs"))
    expect(rows.filter(has_text="1 d 3 h left")).to_have_count(4)
    for width in (1360, 1280, 1100):
        page.set_viewport_size({"width": width, "height": 900})
        assert grid.evaluate("grid => grid.scrollWidth - grid.clientWidth") == 0
        heights = rows.evaluate_all(
            "rows => rows.map(row => [row.offsetHeight, row.querySelector('.why-short').innerText])"
        )
        assert len({height for height, why in heights if not why}) == 1
        assert max(height for height, _ in heights) <= 92, "a reason has three lines at most"
    page.goto(viewer.sample.page(f"jobs/{viewer.sample.job}/checkpoints"))
    expect(page.locator(".checkpoints tbody tr")).to_have_count(3)
    heights = "row => new Set([...row.cells].map(cell => cell.getBoundingClientRect().height)).size"
    assert page.locator(".checkpoints tbody tr").first.evaluate(heights) == 1


def test_comparison_page_reports_jobs_beyond_ten_and_unknown_jobs(browser, viewed):
    page = sign_in(browser, viewed, viewed.new_link()).open(
        "compare?jobs=" + ",".join(f"job_{number:012}" for number in range(11))
    )
    expect(page.get_by_text("The first 10 of 11 jobs are compared.")).to_be_visible()
    expect(page.get_by_text(re.compile("There is no such job: job_000000000000, .*job_000000000009"))).to_be_visible()


def test_charts_of_a_job_zoom_together_and_can_be_saved(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/charts")
    loss = page.get_by_role("img", name="Loss. train")
    expect(loss).to_be_visible()
    box = loss.bounding_box()
    middle = box["y"] + box["height"] / 2
    with page.expect_response(re.compile(r"until_step=")) as asked:
        page.mouse.move(box["x"] + 0.3 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=4)
        page.mouse.up()
    steps = asked.value.json()["steps"]
    assert 20 < len(steps) < 120, "zooming asks for more of what is looked at"
    section = page.get_by_role("region", name="Loss")
    with page.expect_download() as download:
        section.get_by_role("combobox").select_option("csv")
    lines = download.value.path().read_text().splitlines()
    assert lines[0] == "step,train,validation" and 20 < len(lines) < 120
    with page.expect_download() as download:
        page.get_by_role("region", name="Throughput").get_by_role("combobox").select_option("svg")
    assert download.value.path().read_text().startswith("<svg")
    with page.expect_download() as download:
        section.get_by_role("combobox").select_option("png")
    assert download.value.path().read_bytes()[:4] == b"\x89PNG"

    page.mouse.move(box["x"] + 0.5 * box["width"], middle)
    expect(page.locator(".chart-cursor:visible")).not_to_have_count(0)
    expect(section.locator(".chart-tip")).to_contain_text("train")
    expect(page).to_have_url(re.compile(r"from=\d.*to=\d"))
    zoomed = page.get_by_role("button", name="Reset zoom: Loss")
    page.reload()
    expect(section.get_by_role("button", name="train")).to_have_attribute("title", re.compile("min .* max "))
    zoomed.click()
    expect(zoomed).to_be_hidden()
    expect(page).not_to_have_url(re.compile("from="))
    slider = page.get_by_label("Smoothing")
    slider.focus()
    page.keyboard.press("End")
    expect(page.get_by_text("0.99", exact=True)).to_be_visible()
    page.mouse.move(box["x"] + 0.4 * box["width"], middle)
    expect(section.locator(".chart-tip")).to_contain_text("(raw ")
    expect(page.get_by_role("region", name="Step time").locator(".chart-tip")).to_contain_text(" s (raw ")
    page.goto(viewer.sample.page(f"jobs/{viewer.sample.job}/charts"))
    expect(slider).to_have_value("0.99")
    slider.fill("0")
    expect(section.get_by_role("button", name="train")).to_be_visible()
    page.get_by_label("Measure progress by").select_option("tokens")
    with page.expect_download() as download:
        section.get_by_role("combobox").select_option("csv")
    assert download.value.path().read_text().startswith("tokens,train")
    page.get_by_label("Measure progress by").select_option("time")
    section.get_by_role("button", name="Log scale: Loss").click()
    expect(section.get_by_role("button", name="Log scale: Loss")).to_have_attribute("aria-pressed", "true")
    section.get_by_role("img").focus()
    for _ in range(80):
        page.keyboard.press("+")
    page.keyboard.press("0")
    section.get_by_role("button", name="train").click()
    expect(section.get_by_role("img")).not_to_have_attribute("aria-label", re.compile("train"))


def test_job_list_keeps_its_filters_in_the_address_and_leads_to_comparison(viewer):
    page = viewer.open()
    for name in ("quickstart", "tiny-llama"):
        page.get_by_label(f"Compare {name}").check()
        page.get_by_label("Search by name or id").fill("wide")
        expect(page.get_by_label(f"Compare {name}")).to_have_count(0)
        page.get_by_label("Search by name or id").fill("")
        expect(page.get_by_label(f"Compare {name}")).to_be_checked()
    page.get_by_role("button", name="Compare 2").click()
    expect(page).to_have_title("Compare – Manta")
    expect(page.locator(".chip")).to_have_count(2)
    expect(page.get_by_role("img", name=re.compile("Loss.*quickstart.*"))).to_be_visible()
    expect(page.get_by_text("Nothing: their specs are the same.")).to_be_visible()
    expect(page.get_by_text("have identical losses at all 200 steps compared")).to_be_visible()
    expect(page.get_by_role("table", name="Figures")).to_contain_text("SUCCEEDED")
    page.get_by_label("Measure progress by").select_option("tokens")
    expect(page).to_have_url(re.compile("x=tokens"))
    page.reload()
    expect(page.locator(".chip")).to_have_count(2)
    page.get_by_label("Hide tiny-llama").click()
    expect(page.locator(".chip")).to_have_count(1)


def test_menu_ignores_arrow_and_letter_keys_while_closed(viewer):
    page = viewer.open(f"compare?jobs={viewer.sample.job}")
    expect(page.locator(".chip")).to_have_count(1)
    add = page.get_by_label("Add a job")
    expect(add.locator("option")).not_to_have_count(1)
    changes = "list => { window.chosen = 0; list.addEventListener('change', () => window.chosen++); list.focus(); }"
    for menu in (add, page.get_by_label("Download: Loss")):
        menu.evaluate(changes)
        for key in ("ArrowDown", "Escape", "t", "Escape", "End", "Escape"):
            page.keyboard.press(key)
        assert page.evaluate("window.chosen") == 0
    expect(page.locator(".chip")).to_have_count(1)
    add.select_option(index=1)
    expect(page.locator(".chip")).to_have_count(2)


def test_logs_are_filtered_by_rank_and_text(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/logs")
    log = page.get_by_role("log")
    expect(log).to_contain_text("[7] step 146")
    page.get_by_label("Rank of the log").select_option("3")
    expect(log.locator(".log-line").first).to_contain_text("[3]")
    expect(log.locator(".log-line")).to_have_count(31)
    page.get_by_label("Only lines with").fill("/step 1[0-4]\\d:/")
    expect(log.locator(".log-line")).to_have_count(10)
    page.get_by_label("Only lines with").fill("/(/")
    expect(page.get_by_role("status").filter(has_text="regex")).to_be_visible()
    expect(page).to_have_url(re.compile("rank=3"))
    page.get_by_label("Only lines with").fill("")
    expect(log.locator(".log-line")).to_have_count(31)
    page.get_by_label("Level").select_option("error")
    expect(log).to_have_text("No line matches.")
    viewer.complaints.said = [text for text in viewer.complaints.said if "422" not in text]


def test_parts_of_a_step_are_drawn_over_time(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/step")
    expect(page.get_by_role("img", name=re.compile("Parts of a step over time.*forward.*backward"))).to_be_visible()
    expect(page.get_by_text("No steps have been traced yet.")).to_be_visible()


PAINTED = """() => { const pen = CanvasRenderingContext2D.prototype, { fillRect, fillText } = pen; window.painted = {};
    pen.fillRect = function (...at) { this.under = this.fillStyle; fillRect.apply(this, at); };
    pen.fillText = function (text, ...at) { window.painted[text] = this.under; fillText.call(this, text, ...at); }; }"""
COLOUR = """(name) => { const pen = document.createElement("canvas").getContext("2d");
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
    return pen.fillStyle; }"""


@pytest.mark.parametrize(
    ("compute", "idle", "name", "tone", "tip"),
    [
        (3, 60, "idle without capacity", "bad", "idle without capacity 1 min 0 s compute 3.00 s"),
        (60, 3, "compute", "good", "compute 1 min 0 s idle without capacity 3.00 s"),
    ],
)
def test_lifetime_segment_has_name_and_colour_of_its_longest_class(viewer, compute, idle, name, tone, tip):
    def with_one_interval(route):
        answer = route.fetch()
        ledger = answer.json()
        seconds = {"compute": compute, "idle_without_capacity": idle}
        ledger["intervals"] = [{"begin": ledger["began_at"], "end": ledger["until"], "seconds": seconds}]
        route.fulfill(response=answer, json=ledger)

    page = viewer.open(f"jobs/{viewer.sample.job}")
    page.route("**/ledger?intervals=true", with_one_interval)
    page.evaluate(PAINTED)
    page.get_by_role("link", name="History", exact=True).click()
    page.wait_for_function("() => 'RUNNING' in window.painted")
    painted = page.evaluate("window.painted")
    assert painted.get(name) == page.evaluate(COLOUR, tone)
    page.locator(".lane-plot").hover(position={"x": 600, "y": 50})
    expect(page.locator(".lane-plot .chart-tip")).to_have_text(f"time {tip}")


def test_ranks_page_shows_stragglers_waits_and_places(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/ranks")
    expect(page.get_by_role("table", name="Ranks").locator("tbody tr")).to_have_count(8)
    waits = page.get_by_role("region", name="Who waits for whom").first
    expect(waits).to_contain_text("most of them in the end for rank 3")
    expect(page.get_by_role("table", name="Who waits for whom").locator("tbody tr")).to_have_count(8)
    page.get_by_role("table", name="Ranks").get_by_role("button", name="3").click()
    expect(page.locator(".rank-detail")).to_contain_text("stage 1, tensor 1, replica 0")
    page.get_by_role("button", name="Current stack").click()
    expect(page.locator(".stack:not(.why-printed)")).to_contain_text("line 7 in forward")
    grid = page.locator(".rank-plot")
    grid.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".rank-detail")).to_contain_text("rank 4: running")
    page.get_by_role("link", name="Log", exact=True).click()
    expect(page.get_by_label("Rank of the log")).to_have_value("4")
    expect(page.locator(".log-line").first).to_contain_text("[4]")


def test_checkpoints_that_are_gone_are_folded_away(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/checkpoints")
    expect(page.get_by_role("table", name="Checkpoints", exact=True).locator("tbody tr")).to_have_count(3)
    expect(page.get_by_text("3 checkpoints, 28.2 MiB")).to_be_visible()


def test_queue_page_says_which_jobs_wait_and_why(viewer):
    page = viewer.open("queue")
    expect(page.get_by_role("table", name="Queued jobs")).to_contain_text("wide")
    line = page.get_by_role("table", name="Queued jobs").locator("tbody tr")
    expect(line.locator("td")).to_have_text(
        [
            "1",
            re.compile("wide"),
            "2 × 2 × 2",
            "0",
            re.compile("needs 16"),
            "in about 2 min",
            re.compile("just now|min"),
        ]
    )
    expect(page.get_by_role("table", name="Running jobs")).to_contain_text("quickstart")
    row = page.get_by_role("table", name="Queued jobs").get_by_role("row").filter(has_text="wide")
    row.evaluate("(element) => { element.dataset.mark = 'the same'; }")
    for _ in range(2):
        with page.expect_response(re.compile("state=QUEUED")):
            pass
    expect(row).to_have_attribute("data-mark", "the same")


def test_specs_are_checked_while_one_types_and_submitted(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open("submit")
    expect(page.get_by_text("8 ranks: 2 × 2 × 2")).to_be_visible()
    expect(page.get_by_text(re.compile("Planned: .* a step"))).to_be_visible()
    editor = page.get_by_role("textbox", name="Job file")
    good = editor.input_value()
    editor.fill(good.replace("heads: 4", "heads: 5"))
    expect(page.locator(".problems")).to_contain_text("model.heads")
    expect(page.get_by_text("must divide")).to_have_count(1)
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_disabled()
    editor.fill(good + "train: [")
    expect(page.locator(".problems")).to_contain_text("line")
    editor.fill(good + "resources: {accelerator: gpu}\n")
    expect(page.get_by_text(re.compile("^Nothing is planned: .*needs GPUs, and this cluster has none"))).to_be_visible()
    expect(page.get_by_text(re.compile("Planned: .* a step"))).to_have_count(0)
    editor.fill(good.replace("{source: python-stdlib}", "{source: text, paths: [nowhere.txt]}"))
    expect(page.get_by_text("The job would fail: no such file or directory: /nowhere.txt.")).to_be_visible()
    editor.fill(good.replace("quickstart", "from-the-browser"))
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_enabled()
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page).to_have_title("from-the-browser – Manta")
    expect(page.locator("h1 + .badge")).to_have_text("QUEUED")
    page.get_by_role("link", name="Spec", exact=True).click()
    page.get_by_role("link", name="Submit another like it").click()
    expect(page.get_by_role("textbox", name="Job file")).to_have_value(re.compile("from-the-browser"))
    expect(page.get_by_text("8 ranks: 2 × 2 × 2")).to_be_visible()


HELD = """() => { const real = window.fetch; window.fetch = async (address, options) => {
    const answer = await real(address, options);
    if (String(options?.body).includes("name: held")) await new Promise((go) => { window.go = go; });
    return answer; }; }"""


def test_submit_page_submits_the_visible_spec_exactly_once(followed, browser):
    page = sign_in(browser, followed, followed.link).open("submit")
    submit, editor = page.get_by_role("button", name="Submit", exact=True), page.get_by_role("textbox", name="Job file")
    expect(submit).to_be_enabled()
    good = editor.input_value()
    page.evaluate(HELD)
    editor.fill(good.replace("name: quickstart", "name: held"))
    page.wait_for_function("() => window.go")
    editor.fill(good.replace("name: quickstart", "name: shown"))
    expect(submit).to_be_enabled()
    with page.expect_response("**/v1/jobs?dry_run=true"):
        page.evaluate("() => window.go()")
    lost = []  # the service makes the job, and its answer is lost
    page.route("**/v1/jobs", lambda route: (lost.append(route.fetch()), route.abort()), times=1)
    submit.click()
    expect(page.get_by_text("only one job will be created")).to_be_visible()
    submit.click()
    expect(page).to_have_title("shown – Manta")
    expect(page).to_have_url(re.compile(lost[0].json()["id"]))


def test_submit_page_submits_a_changed_spec_as_another_job_after_a_lost_answer(followed, browser):
    page = sign_in(browser, followed, followed.link).open("submit")
    submit, editor = page.get_by_role("button", name="Submit", exact=True), page.get_by_role("textbox", name="Job file")
    expect(submit).to_be_enabled()
    page.route("**/v1/jobs", lambda route: (route.fetch(), route.abort()), times=1)
    submit.click()
    expect(page.get_by_text("only one job will be created")).to_be_visible()
    editor.fill(editor.input_value().replace("name: quickstart", "name: changed"))
    expect(submit).to_be_enabled()
    submit.click()
    expect(page).to_have_title("changed – Manta")


def test_submit_button_is_enabled_even_if_the_key_scope_arrives_late(viewer):
    page, held = viewer.open(), []
    page.route("**/v1/me", lambda route: held.append(route))
    with page.expect_response("**/v1/jobs?dry_run=true"):
        page.goto(viewer.sample.page("submit"))
    held[0].continue_()
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_enabled()
    expect(page.get_by_text("Your key may not submit jobs.")).to_have_count(0)


def test_planner_answers_with_reasons_and_pictures(viewer):
    page = viewer.open("plan")
    expect(page.get_by_text(re.compile("No plan yet"))).to_be_visible()
    page.get_by_label("Examples").select_option("GPT 22B on 8 A100 (arXiv:2205.05198)")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("table", name="Plans").locator("tbody tr").first).to_be_visible()
    expect(page.locator(".budget-row").first).to_be_visible()
    expect(page.get_by_role("img", name="The planned step")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("stage 0: parameters"))).to_be_visible()
    page.get_by_role("textbox", name="What to plan").fill("model: {layers: 3}\ncluster: {nodes: 0}\n")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator(".problems li").first).to_be_visible()
    viewer.complaints.said = [text for text in viewer.complaints.said if "422" not in text]
    page.get_by_role("textbox", name="What to plan").fill(
        "model: {layers: 4, hidden_size: 128, heads: 4, sequence_length: 128}\ndata: {source: python-stdlib}\n"
    )
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("table", name="Plans")).to_be_visible()


@pytest.mark.soak
def test_every_example_of_the_planner_page_has_a_plan(viewer):
    page = viewer.open("plan")
    for name in page.get_by_label("Examples").locator("option").all_inner_texts():
        page.get_by_label("Examples").select_option(name)
        page.get_by_role("button", name="Plan", exact=True).click()
        expect(page.get_by_text("Searching for layouts ...")).to_be_hidden()
        expect(page.get_by_role("table", name="Plans").locator("tbody tr").first, name).to_be_visible()


def test_access_page_creates_shows_once_and_revokes_keys(followed, browser):
    viewer = sign_in(browser, followed, followed.link)
    page = viewer.open("access")
    expect(page.get_by_text("admin in all projects")).to_be_visible()
    page.get_by_role("button", name="New key").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Days").fill("0")
    form.get_by_label("Highest priority").fill("5")
    page.get_by_role("button", name=re.compile("Create")).click()
    form.get_by_label("Scope").select_option("submit")
    form.get_by_label("Name").fill("for a test")
    form.get_by_label("Name").press("Enter")
    form.get_by_label("Days").fill("30")
    form.get_by_label("Days").press("Enter")
    key = page.get_by_role("dialog").locator("pre").inner_text()
    assert len(key) > 40
    page.get_by_role("button", name="I have copied it").click()
    line = page.locator("tbody tr", has_text="for a test")
    expect(line).to_contain_text("submit, priorities up to 5")
    expect(line).to_contain_text("valid")
    assert key not in page.content()
    line.get_by_role("button", name="revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(line).to_contain_text("revoked")
    expect(page.get_by_role("table", name="Audit")).to_contain_text("create key")


def test_log_page_shows_printed_html_as_plain_text(viewer):
    page = viewer.open(f"jobs/{viewer.sample.job}/logs")
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    page.get_by_label("Only lines with").fill("onerror")
    expect(page.get_by_role("log")).to_contain_text(MARKUP)
    expect(page.get_by_role("log").locator("img")).to_have_count(0)


def test_ranks_page_shows_thousands_of_ranks_on_one_screen(followed, browser):
    """8 x 24 x 16, one of which holds up the others."""
    places = [
        {"rank": rank, "tensor": rank % 8, "pipeline": rank // 8 % 24, "data": rank // 192, "node": f"n{rank // 8}",
         "device": f"cuda:{rank % 8}", "pid": 1000 + rank, "generation": 2, "state": "running"}
        for rank in range(3072)
    ]  # fmt: skip
    slow = {"rank": 1700, "own_seconds": 0.9, "usual_seconds": 0.4, "sentence": "rank 1700 holds up the others"}
    own = packed(0.9 if rank == 1700 else 0.4 for rank in range(3072))
    sample = RankSample(200, 1.0, own, packed([2.0**30] * 3072), (slow,))

    def grown(session):
        ranks.replace(session, followed.job, places)
        ranks.store_numbers(session, followed.job, 2, sample, time.time())

    followed.store.write(grown)
    page = sign_in(browser, followed, followed.link).open(f"jobs/{followed.job}/ranks")
    expect(page.locator(".rank-summary")).to_contain_text("3,072 ranks on 384 nodes: 3072 running; slow: 1700")
    expect(page.locator(".verdict")).to_contain_text("Rank 1700 holds up the others")
    box = page.locator(".rank-plot").bounding_box()
    assert box["y"] + box["height"] <= 900, "the whole grid is on the screen"
