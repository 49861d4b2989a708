"""The dashboard's classes, in the browser that they are for: what they ask for, keep and show."""

from tests.api.ui.browser import needs_chromium

pytestmark = needs_chromium


FOLLOWED = """async (module) => {
    const calls = [];
    const waits = [];
    const refresh = () => new Promise((go) => { calls.push(calls.length); waits.push(go); });
    const live = new module.Live(refresh, 1000);
    const settled = () => new Promise((done) => setTimeout(done));
    %s
}"""


def followed(run, body):
    return run("core/live.js", FOLLOWED % body)


def test_live_page_rereads_once_for_changes_during_a_read(run):
    """Else what a viewer has just done is shown only with the next turn, or never where the job is over."""
    assert followed(run, """
        live.start(); live.now(); live.now();
        const before = calls.length;
        waits[0](true); await settled();
        const after = calls.length;
        waits[1](true); await settled();
        const last = calls.length;
        live.stop();
        return [before, after, last, live.timer];
    """) == [1, 2, 2, None]  # fmt: skip


def test_live_page_pauses_while_hidden_and_resumes_at_once(run):
    assert followed(run, """
        const see = (seen) => {
            Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        };
        live.start(); see(false); waits[0](); await settled();
        const hidden = [calls.length, live.timer];
        see(true); await settled();
        const seen = calls.length;
        waits[1](); await settled();
        const waiting = live.timer !== null;
        live.stop(); see(true); await settled();
        delete document.hidden;
        return [...hidden, seen, waiting, calls.length];
    """) == [1, None, 2, True, 2]  # fmt: skip


def test_live_polling_backs_off_while_the_service_is_away(run):
    assert followed(run, """
        live.seconds = 2;
        const pauses = [0, 1, 2, 3, 4, 9].map((failures) => { live.failures = failures; return live.pause(); });
        live.stop();
        return pauses;
    """) == [2, 2, 4, 8, 15, 15]  # fmt: skip


def test_live_page_that_was_left_stops_polling(run):
    assert followed(run, """
        live.start(); live.now(); live.stop();
        waits[0](); await settled();
        return [calls.length, live.timer];
    """) == [1, None]  # fmt: skip


def test_live_polling_returns_to_its_usual_pause_after_an_answer(run):
    assert followed(run, """
        live.failures = 4; live.start(); waits[0](); await settled();
        live.stop();
        return [live.failures, live.pause()];
    """) == [0, 1000]  # fmt: skip


ASKED = """async (module, answers, ...given) => {
    const kept = window.fetch;
    const asked = [];
    window.fetch = async (url, ...options) => {
        // The page itself goes on asking for what it shows.
        if (!url.includes("/v1/jobs/j/")) return kept(url, ...options);
        asked.push(new URL(url, location).search);
        return new Response(JSON.stringify(answers.shift()));
    };
    try { %s } finally { window.fetch = kept; }
}"""


def test_metric_curves_request_new_steps_and_repeat_the_last_ones(run):
    """Whose validation loss may come after the rest."""

    def answer(*steps):
        return {"steps": steps, "series": {"loss": [1.0] * len(steps), "validation_loss": [None] * len(steps)}}

    asked = run("parts/curves.js", ASKED % """
        const curves = new module.JobCurves("j", ["loss"], ["validation_loss"], 50);
        for (let turn = 0; turn < 3; turn += 1) await curves.poll();
        return asked;
    """, [answer(49), answer(49, 50), answer(50), answer(50, 51), answer(50)])  # fmt: skip
    seldom = "?names=validation_loss%2Ctokens%2Ctime&after_step={}&max_points=2000&every=50"
    often = "?names=loss&after_step={}&max_points=1500"
    assert asked == [often.format(0), often.format(41), seldom.format(0), often.format(42), seldom.format(49)]


def test_validation_losses_are_also_asked_for_after_the_last_step(run):
    def answer(*steps):
        return {"steps": steps, "series": {"loss": [1.0] * len(steps), "validation_loss": [2.0] * len(steps)}}

    asked = run("parts/curves.js", ASKED % """
        const curves = new module.JobCurves("j", ["loss"], ["validation_loss"], 50, 60);
        for (let turn = 0; turn < 4; turn += 1) await curves.poll();
        return asked;
    """, [answer(50), answer(50), answer(59), answer(60), answer(60), answer(60)])  # fmt: skip
    assert ["every=50" in each for each in asked] == [False, True, False, False, True, False]


def test_metric_curve_shows_the_newest_range_when_answers_arrive_out_of_order(run):
    shown = run("parts/curves.js", """async (module) => {
        const curves = new module.JobCurves("j", ["loss"]);
        const waits = [];
        curves.read = () => new Promise((go) => waits.push((step) => go({ steps: [step], series: { loss: [1] } })));
        const [first, second] = [curves.look([0, 9]), curves.look([90, 99])];
        waits[1](95); waits[0](5);
        return [await first, await second, curves.shown.columns.step];
    }""")  # fmt: skip
    assert shown == [False, True, [95]]


def test_lane_view_is_clamped_to_its_ends(run):
    views = run("charts/lanes.js", """(module) => {
        const lanes = Object.assign(Object.create(module.Lanes.prototype), { whole: [0, 100], view: null });
        Object.assign(lanes, { draw() {}, onView() {} });
        const after = (act) => { act(); return lanes.view; };
        return [
            after(() => lanes.look([-10, 20])), after(() => lanes.look([90, 120])), after(() => lanes.look(null)),
            after(() => lanes.zoom(50, 0.5)), after(() => lanes.zoom(50, 4)),
        ];
    }""")  # fmt: skip
    assert views == [[0, 30], [70, 100], None, [25, 75], None]


def test_chart_group_resets_the_view_and_redraws_all_charts_on_another_axis(run):
    heard = run("charts/group.js", """(module) => {
        const heard = [];
        const group = new module.ChartGroup({ onView: (view) => heard.push(view) });
        group.add({ draw: () => heard.push("drawn") });
        group.look([1, 2]);
        group.measureBy("tokens");
        return [...heard, group.axis, group.view];
    }""")  # fmt: skip
    assert heard == ["drawn", [1, 2], "drawn", None, "tokens", None]


def test_dom_attributes_that_turn_false_are_removed(run):
    assert run("core/dom.js", """({ h, setAttribute, setVisible }) => {
        const button = h("button", { disabled: true, title: "a" }, "b", null, ["c", false]);
        const before = [button.disabled, button.title, button.textContent];
        setAttribute(button, "disabled", false);
        setAttribute(button, "title", null);
        setVisible(button, false);
        return [...before, button.disabled, button.hasAttribute("title"), button.hidden];
    }""") == [True, "a", "bc", False, False, True]  # fmt: skip


def test_links_of_the_dashboard_alone_are_followed_without_loading(run):
    followed = run("core/router.js", """(module, cases) => cases.map(([href, attributes, keys]) => {
        const anchor = Object.assign(document.createElement("a"), { href, ...attributes });
        const gone = [];
        const event = { button: 0, target: { closest: () => anchor }, ...keys };
        event.preventDefault = () => gone.push("here");
        module.Router.prototype.follow.call({ go: () => gone.push("gone") }, event);
        return gone.length === 2;
    })""", [["/ui/jobs/a", {}, {}], ["/ui/jobs/a", {"download": "a.csv"}, {}], ["/ui/jobs/a", {"target": "_blank"}, {}],
            ["/ui/jobs/a", {}, {"ctrlKey": True}], ["/ui/jobs/a", {}, {"button": 1}], ["/v1/jobs", {}, {}],
            ["http://elsewhere.test/ui/", {}, {}]])  # fmt: skip
    assert followed == [True, *[False] * 6]


def test_router_opens_the_page_requested_last(run):
    opened = run("core/router.js", """async (module) => {
        const [opened, waits] = [[], []];
        const load = () => new Promise((go) => waits.push((name) => go({ open: async () => { opened.push(name); } })));
        const router = Object.assign(Object.create(module.Router.prototype), {
            opened: 0, page: null, context: {}, root: document.createElement("main"), matching: () => [load, {}],
        });
        const turns = [router.open(), router.open()];
        waits[1]("second"); waits[0]("first");
        await Promise.all(turns);
        return opened;
    }""")  # fmt: skip
    assert opened == ["second"]


def test_rank_colors_span_the_range_of_values_unless_all_are_alike(run):
    colours = run("parts/rank_grid.js", """(module, columns) => columns.map((seconds) => {
        const grid = new module.RankGrid();
        grid.ranks = seconds.map((own_seconds) => ({ own_seconds }));
        const range = grid.range((rank) => rank.own_seconds);
        grid.close();
        return range;
    })""", [[1.0, 2.0, None], [1.0, 1.02]])  # fmt: skip
    assert colours == [[1.0, 2.0], [0.5, 1.53]]


def test_replaced_ranks_are_counted_with_the_time_and_cause_of_the_last_recovery(run):
    recoveries = [
        {"forked": forked, "time": f"t{at}", "cause": f"cause {at}"} for at, forked in enumerate([[5], [], [5, 1]])
    ]
    replaced = run("parts/rank_grid.js", "(module, given) => [...module.replacements(given)]", recoveries)
    last = {"time": "t2", "cause": "cause 2"}
    assert replaced == [[5, {"count": 2, **last}], [1, {"count": 1, **last}]]


def test_list_rows_are_reused_and_reordered(run):
    rows = run("core/dom.js", """(module) => {
        const box = document.createElement("div");
        const made = [];
        const rows = new module.KeyedRows(box, (item) => item.key, (item) => {
            made.push(item.key);
            const element = document.createElement("p");
            return { element, show: (now) => { element.textContent = now.text; } };
        });
        const shown = (...items) => {
            rows.show(items.map(([key, text]) => ({ key, text })));
            return [...box.children].map((each) => each.textContent).join("");
        };
        const three = shown([1, "a"], [2, "b"], [3, "c"]);
        return [three, shown([3, "C"], [1, "A"], [4, "D"]), shown([4, "d"]), shown([2, "b"]), made];
    }""")  # fmt: skip
    assert rows == ["abc", "CAD", "d", "b", [1, 2, 3, 4, 2]]
