"""The dashboard's pure functions, called in the browser that they are for."""

import csv
import io
import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manta.service.planner.part_labels import PHASE_LABELS
from manta.workers.timing.step_phases import PARTS
from tests.api.ui.browser import needs_chromium

pytestmark = needs_chromium

VALUES = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: value + 0.0)


def drawn(**options):
    return settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), **options)


@drawn()
@given(st.tuples(VALUES, VALUES).filter(lambda ends: ends[0] < ends[1] - 1e-6), st.integers(1, 20))
def test_chart_ticks_are_round_ascending_and_few(call, ends, most):
    low, high = ends
    ticks = call("charts/scale.js", "ticks", low, high, most)
    assert ticks == sorted(ticks) and len(set(ticks)) == len(ticks) <= most + 1
    room = 1e-6 * max(abs(low), abs(high), high - low)
    assert all(low - room <= each <= high + room for each in ticks)
    if len(ticks) > 2:
        steps = [after - before for before, after in itertools.pairwise(ticks)]
        assert max(steps) - min(steps) <= 1e-3 * max(steps)


@pytest.mark.parametrize("width", [1e-3, 1e-5, 2**-22])
def test_chart_ticks_are_few_at_any_zoom_level(call, width):
    for name in ("ticks", "timeTicks"):
        assert 1 <= len(call("charts/scale.js", name, 1.8e9, 1.8e9 + width, 8)) <= 9


@pytest.mark.parametrize(("low", "high"), [(0, 30), (1_700_000_000, 1_700_000_090), (1_700_000_000, 1_702_000_000)])
def test_chart_time_ticks_are_at_full_minutes_hours_and_days(call, low, high):
    ticks = call("charts/scale.js", "timeTicks", low, high, 8)
    assert 1 <= len(ticks) <= 9 and all(low <= each <= high for each in ticks)
    step = ticks[1] - ticks[0]
    assert all(each % step == ticks[0] % step for each in ticks)


@drawn()
@given(st.lists(st.floats(-1e3, 1e3, allow_nan=False) | st.just(math.nan), max_size=50), st.floats(0, 0.99))
def test_curve_smoothing_stays_within_its_values_and_begins_with_the_first(call, values, weight):
    """What is no number stays as it is, and moves nothing."""
    with_holes = call("charts/scale.js", "smoothed", values, weight)
    assert [each is None for each in with_holes] == [math.isnan(each) for each in values]
    values = [each for each in values if not math.isnan(each)]
    smoothed = [each for each in with_holes if each is not None]
    for place, each in enumerate(smoothed):
        assert min(values[: place + 1]) - 1e-6 <= each <= max(values[: place + 1]) + 1e-6
    if values:
        assert smoothed[0] == pytest.approx(values[0], abs=1e-9)


def test_csv_download_is_read_back_as_written(call):
    rows = [["plain", 1.5, None], ['says "no"', "a, b", "two\nlines"], ["", 0, -1]]
    text = call("core/download.js", "csv", ["a", "b", "c"], rows)
    written = [["" if cell is None else str(cell) for cell in row] for row in rows]
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b", "c"], *written]


def test_api_client_reads_lists_page_by_page_up_to_a_limit(call):
    whole = call("core/api.js", "all", "/v1/jobs")
    assert len(whole) > 3
    assert [job["id"] for job in call("core/api.js", "all", "/v1/jobs", {"limit": 1})] == [job["id"] for job in whole]
    assert len(call("core/api.js", "all", "/v1/jobs", {"limit": 1}, 2)) == 2


@drawn()
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True).map(sorted), st.floats(-10, 1e6 + 10))
def test_nearest_finds_the_closest_value_on_an_axis(call, xs, wanted):
    place = call("charts/scale.js", "nearest", xs, wanted)
    assert abs(xs[place] - wanted) == min(abs(x - wanted) for x in xs)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), ("nan", "–"), (0, "0 s"), (0.00042, "420 us"), (0.0042, "4.20 ms"), (0.0123, "12.3 ms"),
     (1.254, "1.25 s"), (75, "1 min 15 s"), (119.7, "2 min 0 s"), (3599.6, "1 h 0 min"),
     (3 * 3600 + 240, "3 h 4 min"), (15 * 3600, "15 h 0 min"),
     (2 * 86400 + 7200, "2 d 2 h")],
)  # fmt: skip
def test_dashboard_durations_are_in_readable_units(call, value, text):
    assert call("core/format.js", "duration", value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "1 s"), (9.02, "9 s"), (59.9, "60 s"), (119.7, "2 min 0 s")])
def test_dashboard_times_left_are_whole_seconds(call, value, text):
    assert call("core/format.js", "remaining", value) == text


@pytest.mark.parametrize(
    ("step", "latest", "text"),
    [(60, {"validation_loss": 2.0, "validation_loss_chats": 1.0}, "2.0000"), (70, {"validation_loss": None}, "–"),
     (70, {"validation_loss": None, "validation_loss_chats": 1.5}, "1.5000 at 60"),
     (100, {"validation_loss": 2.0}, "2.0000")],
)  # fmt: skip
def test_validation_loss_of_a_job_is_that_of_its_first_set_with_its_step(call, step, latest, text):
    job = {"step": step, "steps": 100, "metrics": {"latest": latest}, "spec": {"train": {"validate_every": 30}}}
    assert call("parts/job_header.js", "validationText", job) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (80 * 2**30, "80.0 GiB"),
                        (3 * 2**40, "3.00 TiB")]
)  # fmt: skip
def test_dashboard_byte_counts_are_in_binary_units(call, value, text):
    assert call("core/format.js", "bytes", value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (4000, "4,000"), (98_765, "98,765"), (1_250_000, "1.25 M"), (3e-5, "3e-5"), (-5e29, "-5e29")],
)
def test_chart_axis_numbers_are_short(call, value, text):
    assert call("core/format.js", "compact", value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 0.0005, 0.001], ["0", "0.0005", "0.001"]),
        ([0, 1e-4, 2e-4], ["0", "1e-4", "2e-4"]),
        ([1_234_000, 1_234_500, 1_235_000], ["1.234 M", "1.2345 M", "1.235 M"]),
        ([2.00001, 2.00002], ["2.00001", "2.00002"]),
        ([1.0001e-5, 1.0002e-5], ["1.0001e-5", "1.0002e-5"]),
        ([0.1, 0.1], ["0.1", "0.1"]),
    ],
)
def test_chart_tick_labels_of_close_values_differ(call, values, texts):
    assert call("charts/scale.js", "tickTexts", values) == texts


@pytest.mark.parametrize(
    ("style", "high", "texts", "other", "text"),
    [("bytes", 320 * 2**20, ["0 MiB", "100 MiB", "200 MiB", "300 MiB"], 1.25 * 2**20, "1.25 MiB"),
     ("seconds", 1.6, ["0 s", "0.5 s", "1 s", "1.5 s"], 0.0123, "0.0123 s"),
     ("seconds", 0.4, ["0 ms", "100 ms", "200 ms", "300 ms", "400 ms"], 0.0123, "12.3 ms"),
     ("share", 0.16, ["0%", "5%", "10%", "15%"], 0.01234, "1.234%"),
     ("number", 0.0016, ["0", "0.0005", "0.001", "0.0015"], 0.00038, "0.00038")],
)  # fmt: skip
def test_chart_axis_has_round_ticks_and_one_notation_for_all_values(run, style, high, texts, other, text):
    axis = "({ ticksOfY }, high, style, other) => { const { texts, write } = ticksOfY(0, high, 200, style, false);"
    assert run("charts/axes.js", f"{axis} return [texts, write(other)]; }}", high, style, other) == [texts, text]


def test_stacked_columns_end_at_their_sum_and_skip_unknown_values(call):
    edges = call("charts/scale.js", "stacked", [[1, 2, None], [3, math.inf, 5]])
    assert edges == [[0, 0, 0], [1, 2, 0], [4, 2, 5]]


def test_chart_cursor_shows_points_of_a_sparse_line_at_their_own_step_only(run):
    shown = run("charts/chart_tip.js", """({ ChartTip, cursorPlace }, at) => {
        const dense = { name: "train", x: [1, 2, 3, 4], y: [9, 8, 7, 6], smooth: [9, 8.5, 8, 7.5] };
        const lines = [dense, { name: "validation", sparse: true, x: [1, 3], y: [NaN, 5] }];
        return at.map((x) => {
            const [tip, place] = [new ChartTip(), cursorPlace(lines, x, (value) => 100 * value)];
            tip.show(lines, place, "step", String, true);
            return tip.element.textContent;
        });
    }""", [2.1, 2.95, 2.8, 4.4])  # fmt: skip
    assert shown == [
        "step 2train8.5 (raw 8)validation–", "step 3train8 (raw 7)validation5",
        "step 3train8 (raw 7)validation5", "step 4train7.5 (raw 6)validation–",
    ]  # fmt: skip


def test_runs_with_equal_losses_at_all_common_steps_are_said_to_be_identical(run):
    groups = run("parts/curves.js", """({ identical }, runs) => identical(runs.map((losses) => ({
        columns: { step: losses.map((_, at) => at + 1), loss: losses },
    })))""", [[3, 2, 1], [3, 2, 1.5], [3, 2], [9], [3, 2, 1.5, 1]])  # fmt: skip
    assert groups == [{"places": [0, 2], "steps": 2}, {"places": [1, 4], "steps": 3}]


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6, allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@drawn()
@given(st.dictionaries(st.text(max_size=8), DOCUMENTS, max_size=5))
def test_yaml_of_a_document_is_read_back_as_the_document(call, document):
    from manta.workers.spec.yaml import read_yaml

    assert _close(read_yaml(call("core/yaml.js", "toYaml", document)), document)


@pytest.mark.parametrize(
    "text", ["on", "OFF", "Yes", "null", "nan", "true", " a", "a ", "a: b", "# a", "1e3", "-", "~"]
)
def test_yaml_quotes_text_that_looks_like_another_type(call, text):
    from manta.workers.spec.yaml import read_yaml

    assert read_yaml(call("core/yaml.js", "toYaml", {"name": text})) == {"name": text}


def _close(one, other):
    """Equal, whole numbers being written alike in both of JSON's kinds."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    return math.isclose(one, other, rel_tol=1e-12) if numbers else (type(one), one) == (type(other), other)


def test_spec_differences_are_the_fields_that_differ(call):
    one = {"train": {"steps": 5, "rate": 0.1}, "model": {"layers": 2}}
    other = {"train": {"steps": 7, "rate": 0.1}, "model": {"layers": 2, "heads": [1, 2]}}
    differences = call("parts/differences.js", "differences", [one, other])
    assert differences == [["train.steps", "5", "7"], ["model.heads", "–", "[1,2]"]]


@pytest.mark.parametrize(
    ("pattern", "path", "parameters"),
    [("/", "/", {}), ("/jobs/:id", "/jobs/a", {"id": "a"}), ("/jobs/:id", "/jobs/a/", {"id": "a"}),
     ("/jobs/:id/:tab", "/jobs/a/ranks", {"id": "a", "tab": "ranks"}), ("/jobs/:id", "/nodes/a", None),
     ("/", "/jobs", None), ("/jobs/:id", "/jobs/%zz", {"id": "%zz"}), ("/jobs/:id", "/jobs/a%20b", {"id": "a b"})],
)  # fmt: skip
def test_addresses_lead_to_pages(call, pattern, path, parameters):
    assert call("core/router.js", "match", pattern, path) == parameters


@drawn()
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 9, allow_nan=False)), max_size=40), st.integers(0, 20))
def test_curve_columns_hold_each_step_once_with_its_newest_value(call, points, parts):
    """Whatever comes in whatever order, as answers do that overlap."""
    batches = [sorted(dict(points[start :: parts + 1]).items()) for start in range(parts + 1)]
    answers = [
        {"steps": [step for step, _ in batch], "series": {"loss": [loss for _, loss in batch]}} for batch in batches
    ]
    merged = call("parts/curves.js", "merged", ["loss"], answers)
    wanted = {}
    for batch in batches:
        wanted.update(batch)
    assert merged["columns"] == {"step": sorted(wanted), "loss": [wanted[step] for step in sorted(wanted)]}


def test_lost_curves_are_named_with_the_step_at_which_they_stopped_being_numbers(call):
    def lost(*answers):
        parts = [{"steps": list(steps), "series": {"loss": list(values)}} for steps, values in answers]
        return call("parts/curves.js", "merged", ["loss"], parts)["lost"]

    nan = {"loss": {"step": 3, "word": "nan"}}
    assert lost(((1, 2, 3, 4), (2.0, 1.0, "nan", "inf"))) == nan
    assert lost(((1, 2, 3, 4), (2.0, 1.0, "nan", None))) == nan, "what is not known yet is no number either"
    assert lost(((1, 2, 3), (2.0, 1.0, "nan")), ((2, 3, 4), (1.0, "nan", "nan"))) == nan
    assert lost(((1, 2, 3), (2.0, "nan", 1.0)), ((4,), (None,))) == {}
    assert lost(((1, 2), ("nan", None)), ((2, 3), (0.5, 0.4))) == {}
    words = [["train", {"step": 3, "word": "nan"}], ["validation", None], ["norm", {"step": 4, "word": "inf"}]]
    assert call("parts/curves.js", "lostInWords", words) == "train is nan from step 3 on; norm is inf from step 4 on"


RANKS = [
    {"rank": rank, "pipeline": rank % 2, "state": "running", "own_seconds": 0.1, "straggler": None} for rank in range(4)
]


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [({}, "RUNNING", []), ({"straggler": {"sentence": "rank 2 holds up the others"}}, "RUNNING", ["Rank 2 holds up"]),
     ({"state": "exited"}, "RUNNING", ["1 rank has exited: 2"]), ({"state": "exited"}, "RECOVERING", [])],
)  # fmt: skip
def test_attention_notices_name_each_problem_of_a_job(call, changes, state, words):
    ranks = [rank | changes if rank["rank"] == 2 else rank for rank in RANKS]
    job = {"state": state, "generation": 1, "step": 5, "metrics": {"latest": {"loss": 1.0}}}
    notices = call("parts/attention.js", "attention", job, ranks, [])
    assert len(notices) == len(words) and all(word in each["text"] for word, each in zip(words, notices, strict=True))
    job["metrics"]["latest"]["loss"] = "nan"
    assert "nan" in call("parts/attention.js", "attention", job, ranks, [])[-1]["text"]


def test_attention_notices_are_sorted_by_severity_and_ignore_exited_ranks(call):
    job = {"state": "RUNNING", "generation": 1, "step": 5, "metrics": {"latest": {"loss": "inf"}}}
    drifted = {"type": "plan_drift", "generation": 1, "message": "a step takes longer", "data": {}}
    gone = [rank | {"state": "exited"} for rank in RANKS]
    assert [each["tone"] for each in call("parts/attention.js", "attention", job, gone, [drifted])] == ["bad", "warn"]


def test_plans_that_have_drifted_are_reported_until_the_layout_changes(call):
    job = {"state": "RUNNING", "generation": 3, "step": 5, "metrics": {"latest": {"loss": 1.0}}}
    drifted = {"type": "plan_drift", "generation": 1, "message": "a step takes longer", "data": {}}
    recovered, resized = ({"type": "state_changed", "data": {"to": to}} for to in ("RECOVERING", "RESIZING"))
    for events, is_reported in (([drifted, recovered], True), ([drifted, resized], False), ([recovered], False)):
        notices = call("parts/attention.js", "attention", job, RANKS, events)
        assert [each["text"] for each in notices] == (["a step takes longer"] if is_reported else [])


def test_rank_slower_than_the_median_of_its_stage_is_described_so(call):
    said = [call("parts/attention.js", "slownessOf", {"own_seconds": own}, 0.2) for own in (0.3, 0.22, None)]
    times = "its own work takes {} a step, the median of its stage 200.0 ms"
    assert said == [f"{times.format('300.0 ms')}: 1.5 times as long", times.format("220.0 ms"), ""]


def test_chart_marks_an_event_of_a_step_once(call):
    def event(kind, step, to=None):
        return {"type": kind, "step": step, "data": {"to": to}}

    events = [
        event("state_changed", None, "RECOVERING"), event("state_changed", 4, "RUNNING"),
        *[event("state_changed", 5, "RECOVERING")] * 2, event("step_skipped", 5), event("first_step", 6),
        event("state_changed", 7, "RECOVERING"), event("spike", 7), event("state_changed", 7, "FAILED"),
    ]  # fmt: skip
    assert call("parts/job_charts.js", "marksOf", events) == [
        {"step": 5, "label": "recovery", "tone": "warn"},
        {"step": 5, "label": "step skipped", "tone": "bad"},
        {"step": 7, "label": "failure", "tone": "bad"},
        {"step": 7, "label": "spike", "tone": "bad"},
    ]


@pytest.mark.parametrize(
    ("step", "saved", "cost"),
    [
        (0, 0, "It has not completed a step yet."),
        (1, 0, "It has no complete checkpoint: 1 step is lost."),
        (90, 0, "It has no complete checkpoint: 90 steps are lost."),
        (90, 50, "Its newest complete checkpoint is of step 50 and stays on disk; the 40 steps since then are lost."),
        (50, 50, "Its newest complete checkpoint is of step 50 and stays on disk; no step is lost."),
    ],
)
def test_cancel_dialog_says_how_many_steps_would_be_lost(call, step, saved, cost):
    assert call("parts/actions.js", "costOfCancelling", step, saved) == cost


def test_newest_checkpoint_is_the_complete_one_made_last(call):
    made = [(30, 3, "saving"), (20, 1, "complete"), (10, 2, "complete"), (5, 2, "complete"), (50, 2, "deleted")]
    rows = [dict(zip(("step", "generation", "state"), each, strict=True)) for each in made]
    assert call("parts/actions.js", "newestCheckpoint", rows) == rows[2]
    assert call("parts/actions.js", "newestCheckpoint", rows[:1]) is None


def test_trace_page_shows_the_trace_chosen_last_despite_a_late_answer(run):
    trace = {
        "ranks": [{"rank": 0, "steps": [{}], "slices": []}], "critical_path": [], "profiles": [], "planned": None,
        "first_step": 1, "generation": 1, "schedule": "1f1b", "requested_at": "2026-01-02T03:04:05Z",
        "clock": {"error_seconds": None}, "bubble": None, "message": None,
    }  # fmt: skip
    shown = run("pages/job/step.js", """async (module, trace) => {
        const job = { spec: {} }, facts = { step_parts: {} }, [real, answers] = [window.fetch, {}];
        const tab = module.create({ id: "job_1", job, facts, viewer: Promise.resolve(null), refreshNow() {} });
        window.fetch = (url) => new Promise((done) => { answers[url.split("/").at(-1)] = done; });
        try {
            const chosen = ["trace_1", "trace_2"].map((id) => tab.choose(id));
            for (const id of ["trace_2", "trace_1"]) answers[id](new Response(JSON.stringify(trace)));
            await Promise.all(chosen);
            return [tab.shownTrace, tab.tools.querySelector("a").download];
        } finally { window.fetch = real; tab.close(); }
    }""", trace)  # fmt: skip
    assert shown == ["trace_2", "job_1-trace_2.pftrace"]


def test_data_page_shows_epochs_and_preview_of_the_training_data_only(run):
    event = {"type": "data_prepared", "time": "2026-01-02T03:04:05Z", "message": "", "rank": 0, "step": 0}
    corpus = {"documents": 180, "tokens": 70, "epoch_tokens": 80, "preview": [["asked ", False], ["answered", True]]}
    held_out = {"documents": 20, "tokens": 10, "preview": [["held out", True]], "is_validation": True}
    events = [event | {"id": n, "generation": 1, "data": data} for n, data in enumerate([corpus, held_out])]
    figures, text, marked = run("pages/job/data.js", """async (module, items) => {
        const job = { spec: { data: {} }, metrics: { latest: { tokens: 200 } } }, real = window.fetch;
        const answer = { items, next_cursor: null, resume_cursor: "", seconds: {} };
        window.fetch = async () => new Response(JSON.stringify(answer));
        try {
            const tab = module.create({ id: "job_1", job });
            await tab.refresh(undefined, job, true);
            const of = (what) => [...tab.element.querySelectorAll(what)].map((each) => each.textContent);
            return [of("dd").slice(0, 4), of(".preview"), of("mark")];
        } finally { window.fetch = real; }
    }""", events)  # fmt: skip
    assert (figures, text, marked) == (["200", "80", "2.5", "180"], ["asked answered"], ["answered"])


def test_live_polling_backoff_restarts_after_each_answer(run):
    pauses = run("core/live.js", """async ({ Live }, outcomes) => {
        const { Unreachable } = await import(new URL("core/api.js", document.querySelector("script[type=module]").src));
        const [left, pauses] = [[...outcomes], []];
        const live = new Live(() => { if (!left.shift()) throw new Unreachable(); });
        try {
            for (const _ of outcomes) { await live.now(); pauses.push(live.pause()); }
        } finally { live.stop(); }
        return pauses;
    }""", [False, False, False, True, False, True])  # fmt: skip
    assert pauses == [1, 2, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("reason", "text"),
    [("/a/b/broken.jsonl, line 401: not valid JSON", "broken.jsonl, line 401: not valid JSON"),
     ("needs 8 slots, 1 of 2 is free\nTraceback", "needs 8 slots, 1 of 2 is free"),
     ("no such file (/data/x/books.txt) at 5/6", "no such file (books.txt) at 5/6")],
)  # fmt: skip
def test_reason_in_the_job_list_begins_with_the_file_name(call, reason, text):
    assert call("pages/jobs.js", "shortReason", reason) == text


def test_spec_lines_that_were_not_submitted_are_told_apart(run):
    document = {"name": "a", "model": {"layers": 2, "rope": None}, "data": {"paths": [{"file": "b"}], "seed": 0}}
    written = {"name": "a", "model": {"layers": 2}, "data": {"paths": [{"file": "b"}]}}
    lines = run("pages/job/spec.js", """async (module, document, written) => {
        const { toYaml } = await import(new URL("core/yaml.js", document_root()));
        return module.linesOf(toYaml(document), written).filter((each) => !each.isOwn).map((each) => each.line);
        function document_root() { return window.document.querySelector("script[type=module]").src; }
    }""", document, written)  # fmt: skip
    assert lines == ["  rope: null", "  seed: 0"]


@pytest.mark.parametrize(
    ("losses", "best"),
    [([(2.0, 3.0), (1.0, 3.5)], (0, "validation loss")), ([(2.0, 3.0), (1.0, None)], (1, "training loss")),
     ([(2.0, 3.0)], None), ([(None, None), (1.0, None)], None)],
)  # fmt: skip
def test_best_checkpoint_is_that_of_the_lowest_validation_loss_if_all_have_one(call, losses, best):
    rows = [
        {"id": at, "state": "complete", "loss": loss, "validation_loss": validation}
        for at, (loss, validation) in enumerate(losses)
    ]
    found = call("pages/job/checkpoints.js", "bestOf", rows)
    assert (found and (found["id"], found["measure"])) == best


def test_label_editor_removes_labels_that_were_left_out(call):
    changes = call("parts/actions.js", "labelChanges", {"team": "vision", "old": "1"}, "team=text  new a=b=c")
    assert changes == {"team": "text", "old": None, "new": "", "a": "b=c"}


def test_step_parts_of_the_dashboard_match_those_of_the_engine():
    assert set(PHASE_LABELS) == set(PARTS)


def test_zoom_by_tokens_is_translated_to_steps(run):
    """What somebody zooms in on by tokens is asked for by steps, between two steps by the later one."""
    parts = run("parts/curves.js", """(module, looked) => {
        const columns = new module.Columns(["tokens"]);
        columns.merge({ steps: [10, 20, 30], series: { tokens: [100, 200, 300] } });
        return looked.map(([column, value]) => columns.stepAt(column, value));
    }""", [(None, 17), *(("tokens", tokens) for tokens in (-5, 100, 150, 200, 1000))])  # fmt: skip
    assert parts == [17, 10, 10, 20, 20, 30]
    places = run("parts/curves.js", """(module, steps) => {
        const [columns, none] = [new module.Columns(["tokens"]), new module.Columns(["tokens"])];
        columns.merge({ steps: [10, 20, 30], series: { tokens: [100, 200, 300] } });
        return [...steps.map((step) => columns.at("tokens", step)), columns.at(null, 7), none.stepAt("tokens", 5)];
    }""", [5, 10, 15, 99])  # fmt: skip
    assert places == [100, 100, 200, 300, 7, 0]


def test_memory_bars_show_parts_and_share_of_the_device(run):
    memory = {"parameters": 400, "gradients": 200, "optimizer": 0, "activations": 200, "buffers": 0, "total": 800}
    label, widths, share, beside_own, small = run("parts/memory_bars.js", """(module, memory) => {
        const bars = module.memoryBars();
        const widthsNow = () => [...bars.element.querySelectorAll(".memory-bar > div")].map((each) => each.style.width);
        bars.show([["stage 0", memory], ["stage 1", memory, 1000]], 1600);
        const [first, second] = [...bars.element.querySelectorAll(".memory-row")];
        const colours = (row) => [...row.querySelectorAll(".memory-bar > div")].map((each) => each.style.background);
        const keys = [...bars.element.querySelectorAll(".key-mark")].map((each) => each.style.background);
        const answer = [first.querySelector(".memory-bar").getAttribute("aria-label"), widthsNow().slice(0, 3),
            first.querySelector(".number").textContent, second.querySelector(".number").textContent];
        if (JSON.stringify(colours(first)) !== JSON.stringify([keys[0], keys[1], keys[3]])) throw Error("colours");
        bars.show([["stage 0", memory]], 80_000);
        return [...answer, widthsNow()];
    }""", memory)  # fmt: skip
    assert label == "stage 0: parameters 400 B, gradients 200 B, optimizer 0 B, activations 200 B, buffers 0 B"
    assert (widths, share, beside_own) == (["25%", "12.5%", "12.5%"], "800 B, 50.0%", "800 B, 80.0%")
    assert small == ["50%", "25%", "25%"], "of a small job the largest fills the line"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [([("slot", 16, 8, True), ("slot", 16, 16, False)], "1 node (1 lost), 8 of 16 slots free"),
     ([("gpu", 8, 3, True), ("gpu", 8, 8, True), ("slot", 4, 4, True)], "3 nodes, 11 of 16 GPUs free"),
     ([("gpu", 8, 3, True, 4, 1)], "1 node, 3 of 8 GPUs and 1 of 4 slots free"),
     ([("gpu", 8, 3, True, 0, 0), ("gpu", 8, 3, False, 4, 1)], "1 node (1 lost), 3 of 8 GPUs free")],
)  # fmt: skip
def test_cluster_line_counts_living_nodes_and_units(call, nodes, text):
    keys = ("accelerator", "total", "free", "alive", "slots_total", "slots_free")
    cluster = {"nodes": [dict(zip(keys, (*each, 0, 0)[:6], strict=True)) for each in nodes]}
    assert call("parts/cluster_text.js", "clusterText", cluster) == text


def test_failure_cost_counts_all_ranks_that_waited(call):
    recoveries = [
        {"total_seconds": 2.0, "steps_redone": 3, "kept": 7, "forked": [5]},
        {"total_seconds": None, "steps_redone": 1, "kept": 6, "forked": [1, 2]},
    ]
    took = "1 recovery took 2.00 s from failure to the next step (16.0 rank seconds); 3 steps were lost and done again."
    under_way = "A recovery is under way."
    assert call("parts/recovery_table.js", "costSentence", recoveries) == f"{took} {under_way}"
    assert call("parts/recovery_table.js", "costSentence", recoveries[1:]) == under_way


@pytest.mark.parametrize(
    ("columns", "options", "wanted"),
    [([[1, 2, 3]], {"floor": 0}, [0, 3.15]), ([[1, None, 3]], {}, [0.9, 3.1]), ([[-1, 0, 10]], {"log": True}, [5, 20]),
     ([[None, None, None]], {}, [0, 1]), ([[0, 0, 0]], {"log": True}, [0.1, 1])],
)  # fmt: skip
def test_chart_axis_spans_the_visible_values(call, columns, options, wanted):
    drawn_columns = [{"x": [1, 2, 3], "y": each} for each in columns]
    assert call("charts/scale.js", "extent", drawn_columns, 1, 3, options) == pytest.approx(wanted)
    assert call("charts/scale.js", "extent", [{"x": [1, 2, 3], "y": [5, 6, 900]}], 1, 2) == pytest.approx([4.95, 6.05])


@pytest.mark.parametrize(
    ("ago", "text"), [(0, "just now"), (59, "just now"), (60, "1 min"), (7199, "1 h"), (86400, "1 d"), (-5, "just now")]
)
def test_ages_are_printed_coarsely(call, ago, text):
    assert call("core/format.js", "age", "2026-01-02T03:04:05Z", 1767323045000 + 1000 * ago) == text


def test_reason_of_a_job_begins_with_its_queue_place_and_is_empty_while_running(call):
    job = {"state": "QUEUED", "reason": "insufficient_slots", "message": "needs 8", "queue": {"position": 3}}
    assert call("core/format.js", "why", job) == "position 3 in the queue: needs 8"
    for seconds, start in ((20, "within a minute"), (90, "in about 2 min"), (7200, "in about 2 h 0 min")):
        job["queue"] = {"position": 1, "expected_start_seconds": seconds}
        wanted = f"position 1 in the queue, expected to start {start}: needs 8"
        assert call("core/format.js", "why", job) == wanted
    assert call("core/format.js", "why", {**job, "state": "RUNNING"}) == ""


def test_optional_requests_default_on_403_404_and_409_and_raise_other_errors(run):
    answer = run("core/api.js", """async (module, statuses) => {
        const asked = statuses.map((status) => Promise.reject(new module.Problem({}, status)));
        return Promise.all(asked.map((each) => module.optional(each, "without").catch((error) => error.status)));
    }""", [403, 404, 409, 401, 500, 503])  # fmt: skip
    assert answer == ["without", "without", "without", 401, 500, 503]
    query = {"state": ["RUNNING", "PAUSED"], "cursor": None, "search": "", "limit": 0}
    assert call_address(run, "/v1/jobs", query).endswith("/v1/jobs?state=RUNNING&state=PAUSED&limit=0")


def call_address(run, *given):
    return run("core/api.js", "(module, ...given) => module.address(...given)", *given)


def test_merged_curves_keep_a_nan_loss_and_ignore_unknown_values(call):
    answers = [{"steps": [1, 2], "series": {"loss": losses}} for losses in ([1.0, 2.0], ["nan", None])]
    merged = call("parts/curves.js", "merged", ["loss"], answers)
    assert merged["columns"] == {"step": [1, 2], "loss": [None, 2.0]}
    assert merged["lost"] == {"loss": {"step": 1, "word": "nan"}}


def test_ranks_are_held_against_the_median_of_their_own_stage(run):
    times = [(0, 0.1), (0, 0.2), (0, 0.9), (1, 5.0), (1, None)]
    ranks = [
        {**RANKS[0], "rank": rank, "pipeline": stage, "own_seconds": own} for rank, (stage, own) in enumerate(times)
    ]
    usual, about = run("parts/rank_grid.js", """(module, ranks) => {
        const usual = module.usualOf(ranks);
        return [[...usual], module.describe(ranks[3], usual)];
    }""", ranks)  # fmt: skip
    assert usual == [[0, 0.2], [1, 5.0]]
    assert about[-1] == "its own work takes 5.00 s a step, the median of its stage 5.00 s"


def test_trace_lanes_nest_slices_and_mark_the_critical_path(run):
    def slices(*times):
        return [{"kind": "forward", "start": start, "end": end, "micro_batch": 0} for start, end in times]

    trace = {
        "critical_path": [[1, 0], [0, 1]],
        "ranks": [{"rank": 0, "slices": slices((2, 3), (1, 4))}, {"rank": 1, "slices": slices((0.5, 1), (0.5, 9))}],
    }
    lanes, reach = run("parts/trace_lanes.js", """(module, trace) => {
        const lanes = module.lanesOf(trace);
        const about = ({ start, end, critical }) => [start, end, critical];
        return [lanes.map(({ name, slices }) => [name, ...slices.map(about)]), module.rangeOf(lanes)];
    }""", trace)  # fmt: skip
    assert lanes == [["rank 0", [1, 4, True], [2, 3, False]], ["rank 1", [0.5, 9, False], [0.5, 1, True]]]
    assert reach == [0.5, 9]


def test_map_of_experts_says_which_layer_is_least_even_and_marks_the_busiest(call):
    shown = {"step": 5, "layers": [1, 3], "tokens": [[10, 10], [5, 15]], "load": [1.0, 1.5]}
    said = call("parts/expert_map.js", "saidOf", shown)
    assert said == "Step 5: the busiest expert gets 1.50 times the mean of its layer, in layer 3."
    shades = [call("parts/expert_map.js", "shadeOf", ratio) for ratio in (0, 1, 1.5)]
    assert len({each["shade"] for each in shades}) == 3 and shades[0]["alpha"] == 1


def test_moments_layouts_and_events_are_short(call):
    assert call("core/format.js", "utc", "2026-01-02T03:04:05.678Z") == "2026-01-02 03:04:05 UTC"
    sizes = {"tensor": 8, "pipeline": 4, "data": 2, "context": 1}
    assert call("core/format.js", "layout", sizes) == "8 × 4 × 2"
    assert call("core/format.js", "layout", {**sizes, "context": 2}) == "8 × 4 × 2, context 2"
    assert call("core/format.js", "layout", {**sizes, "expert": 2}) == "8 × 4 × 2, expert 2"
    tones = [
        call("core/format.js", "eventTone", {"type": kind, "data": {"to": "RUNNING"}})
        for kind in ("state_changed", "rank_lost", "node_lost", "plan_drift", "adopted")
    ]
    assert tones == ["active", "bad", "bad", "bad", "idle"]


def test_number_format_distinguishes_zero_from_unknown(run, call):
    assert [call("core/format.js", "number", value) for value in (0, 1234.5, None, "nan")] == ["0", "1,235", "–", "nan"]
    assert [call("core/format.js", "counted", count, "job") for count in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    assert call("core/format.js", "percent", 0.1234) == "12.3%"
    spoken = "(module, words) => words.map((word) => module.compact(module.numberOf(word)))"
    assert run("core/format.js", spoken, ["nan", "inf", "-inf", None, "?"]) == ["–", "inf", "-inf", "–", "–"]


def test_dashboard_times_are_in_the_viewers_time_zone(run):
    moment = "new Date(2026, 0, 9, 3, 4, 5).toISOString()"
    clocks = run("core/format.js", f"(module) => [true, false].map((day) => module.clock({moment}, day))")
    assert clocks == ["01-09 03:04:05", "03:04:05"]


def test_chart_day_ticks_are_at_the_viewers_midnight(run):
    ticks = run("charts/scale.js", """(module) => {
        const offset = Date.prototype.getTimezoneOffset;
        Date.prototype.getTimezoneOffset = () => -120;
        try { return module.timeTicks(0, 3 * 86_400, 3); } finally { Date.prototype.getTimezoneOffset = offset; }
    }""")  # fmt: skip
    assert ticks == [day * 86_400 - 7200 for day in (1, 2, 3)]


def test_logarithmic_axis_positions_map_back_to_their_values(run):
    body = "(module, log) => { const axis = module.scale(1, 100, 0, 10, log); return [axis.place(10), axis.value(5)]; }"
    assert run("charts/scale.js", body, True) == pytest.approx([5, 10])
    assert run("charts/scale.js", body, False) == pytest.approx([10 * 9 / 99, 50.5])


def test_sparkline_rises_with_its_values(run):
    body = """(module) => { const line = module.sparkline("Loss"); line.show([1, 2, NaN, 3]);
        return line.element.firstChild.getAttribute("d"); }"""
    assert run("charts/sparkline.js", body) == "M1.0 20.0L48.0 11.0L95.0 2.0"


def test_every_validation_set_has_a_curve_on_the_dashboard(call):
    whole = ["validation", "validation_loss"]
    sets = {"data": {"validation": [{"name": "code"}, {}]}}
    assert call("parts/curves.js", "validationsOf", sets) == [whole, ["validation code", "validation_loss_code"]]
    assert call("parts/curves.js", "validationsOf", {}) == [whole]


@pytest.mark.parametrize(
    ("elastic", "bounds"), [({}, False), ({"max_data": 4}, False), ({"min_data": 2}, True), ({"max_data": 8}, True)]
)
def test_resize_is_offered_for_elastic_jobs_only(run, elastic, bounds):
    job = {"state": "RUNNING", "spec": {"parallel": {"data": 4}, "elastic": elastic}}
    facts = {"actions": {"resize": {"RUNNING": "RUNNING"}}}
    assert run("parts/actions.js", "({ ACTIONS }, ...given) => ACTIONS.resize.offered(...given)", job, facts) is bounds


def test_dashboard_links_omit_empty_parameters(call):
    query = {"jobs": "a,b", "x": "", "y": None, "z": 0}
    assert call("core/router.js", "link", "/compare", query).endswith("/ui/compare?jobs=a%2Cb&z=0")


@pytest.mark.parametrize(
    ("key", "state"),
    [({}, "valid"), ({"expires_at": "2999-01-01T00:00:00Z"}, "valid"),
     ({"expires_at": "2001-01-01T00:00:00Z"}, "expired"),
     ({"expires_at": "2001-01-01T00:00:00Z", "revoked_at": "2000-01-01T00:00:00Z"}, "revoked")],
)  # fmt: skip
def test_key_state_is_valid_expired_or_revoked(call, key, state):
    assert call("pages/access.js", "stateOf", key) == state


def test_dashboard_lists_have_the_chosen_order(call):
    places = [3, None, 1, 2]
    queued = [{"queue": {"position": place}} for place in places]
    assert [job["queue"]["position"] for job in call("pages/queue.js", "inTurn", queued)] == [1, 2, 3, None]
    clicks = [({}, "created"), ({"order": "asc"}, "created"), ({}, "loss"), ({"sort": "loss", "order": "desc"}, "loss"),
              ({"sort": "loss", "order": "asc"}, "loss")]  # fmt: skip
    orders = [call("pages/jobs.js", "orderAfter", *each) for each in clicks]
    assert orders == ["asc", "desc", "desc", "asc", "desc"]


def test_compared_jobs_of_one_name_are_distinguished_by_id(call):
    jobs = [{"name": name, "id": f"job_0000000{number}"} for number, name in enumerate(("a", "a", "b"))]
    assert call("pages/compare.js", "namesOf", jobs) == ["a 00000", "a 00001", "b"]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ({"path": "modle", "rule": "unknown key", "suggestion": "model"},
         "Line 2: unknown key `modle`. Did you mean `model`?"),
        ({"path": "turbo", "rule": "unknown key", "suggestion": "name, model"},
         "unknown key `turbo`. Those here are name, model."),
        ({"path": "train.optimizer.lr", "rule": "must be positive", "suggestion": 0.1},
         "Line 5: `train.optimizer.lr` must be positive. Try `0.1`."),
        ({"path": "data.paths.0", "rule": "must be a text", "suggestion": None},
         "Line 6: `data.paths.0` must be a text."),
        ({"path": "parallel", "rule": "is missing", "suggestion": None}, "`parallel` is missing."),
        ({"path": "", "rule": "it is empty", "suggestion": None}, "It is empty."),
    ],
)  # fmt: skip
def test_problem_of_a_job_file_is_a_sentence_with_its_line(run, problem, text):
    written = "name: lr\nmodle: {}\ntrain:\n  steps: 5\n  optimizer: {lr: -1}\ndata: {paths: [1]}\n"
    body = "(module, problem, text) => module.problemText(problem, module.lineOf(text, problem.path))"
    assert run("parts/problems.js", body, problem, written) == text


def test_text_between_backticks_is_shown_as_code(run):
    html = "(module, text) => module.h('p', {}, module.marked(text)).innerHTML"
    assert run("core/dom.js", html, "run `a <b>` or ` alone") == "run <code>a &lt;b&gt;</code> or ` alone"


def test_queue_page_names_the_job_that_ends_first(call):
    jobs = [
        {"name": name, "eta_seconds": left, "parallel": {"world_size": ranks}}
        for name, left, ranks in (("starting", None, 2), ("long", 7200.0, 4), ("short", 90.0, 1))
    ]
    assert call("pages/queue.js", "firstToEnd", jobs) == "First to end: short, in about 2 min; it releases 1 slot."
    assert call("pages/queue.js", "firstToEnd", jobs[:1]) == ""


@drawn()
@given(st.tuples(*[st.integers(0, 255)] * 3), st.floats(0.05, 1))
def test_text_on_a_color_has_a_contrast_of_at_least_4_5(run, channels, alpha):
    fill = "#" + "".join(f"{channel:02x}" for channel in channels)
    ink, panel = run("charts/colors.js", "(m, ...given) => [m.inkOn(...given), m.color('panel')]", fill, alpha)
    ground = [int(panel[at : at + 2], 16) for at in (1, 3, 5)]
    shade = luminance(alpha * own + (1 - alpha) * below for own, below in zip(channels, ground, strict=True))
    text = luminance([255 if ink == "#fff" else 0] * 3)
    assert (max(text, shade) + 0.05) / (min(text, shade) + 0.05) >= 4.5


def luminance(channels):
    """By WCAG 2.1, of channels from 0 to 255."""
    parts = [
        each / 255 / 12.92 if each / 255 <= 0.04045 else ((each / 255 + 0.055) / 1.055) ** 2.4 for each in channels
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
