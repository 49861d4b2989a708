"""The dashboard's pure functions, called in the browser that they are for."""

import csv
import io
import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.ui.files import DIGEST
from tests.api.ui.browser import needs_chromium, sign_in
from workers.timing.step_parts import PARTS

pytestmark = needs_chromium

VALUES = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: value + 0.0)


@pytest.fixture(scope="module")
def call(chromium, viewed):
    """`call("charts/scale.js", "ticks", 0, 10, 5)`: what a function of a module returns, as JSON knows it."""
    viewer = sign_in(chromium, viewed, viewed.new_link())
    page = viewer.open()

    def called(module, name, *arguments):
        script = """async ([address, name, given]) => {
            const module = await import(address);
            const answer = await module[name](...given);
            return JSON.stringify(answer, (key, value) => (ArrayBuffer.isView(value) ? [...value] : value) ?? null);
        }"""
        return json.loads(page.evaluate(script, [f"/ui/static/{DIGEST}/{module}", name, list(arguments)]))

    yield called
    viewer.context.close()


def drawn(**options):
    return settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), **options)


@drawn()
@given(st.tuples(VALUES, VALUES).filter(lambda ends: ends[0] < ends[1] - 1e-6), st.integers(1, 20))
def test_ticks_are_round_ascending_inside_and_not_too_many(call, ends, most):
    low, high = ends
    ticks = call("charts/scale.js", "ticks", low, high, most)
    assert ticks == sorted(ticks) and len(set(ticks)) == len(ticks) <= most + 1
    room = 1e-6 * max(abs(low), abs(high), high - low)
    assert all(low - room <= each <= high + room for each in ticks)
    if len(ticks) > 2:
        steps = [after - before for before, after in itertools.pairwise(ticks)]
        assert max(steps) - min(steps) <= 1e-3 * max(steps)


@pytest.mark.parametrize("width", [1e-3, 1e-5, 2**-22])
def test_however_near_somebody_looks_ticks_end(call, width):
    for name in ("ticks", "timeTicks"):
        assert 1 <= len(call("charts/scale.js", name, 1.8e9, 1.8e9 + width, 8)) <= 9


@pytest.mark.parametrize(("low", "high"), [(0, 30), (1_700_000_000, 1_700_000_090), (1_700_000_000, 1_702_000_000)])
def test_moments_are_ticked_at_full_minutes_hours_and_days(call, low, high):
    ticks = call("charts/scale.js", "timeTicks", low, high, 8)
    assert 1 <= len(ticks) <= 9 and all(low <= each <= high for each in ticks)
    step = ticks[1] - ticks[0]
    assert all(each % step == ticks[0] % step for each in ticks)


@drawn()
@given(st.lists(st.floats(-1e3, 1e3, allow_nan=False), max_size=50), st.floats(0, 0.99))
def test_smoothing_stays_between_the_values_and_begins_with_the_first(call, values, weight):
    smoothed = call("charts/scale.js", "smoothed", values, weight)
    assert len(smoothed) == len(values)
    for place, each in enumerate(smoothed):
        assert min(values[: place + 1]) - 1e-6 <= each <= max(values[: place + 1]) + 1e-6
    if values:
        assert smoothed[0] == pytest.approx(values[0], abs=1e-9)


def test_rows_are_read_from_csv_as_they_were_written(call):
    rows = [["plain", 1.5, None], ['says "no"', "a, b", "two\nlines"], ["", 0, -1]]
    text = call("core/download.js", "csv", ["a", "b", "c"], rows)
    written = [["" if cell is None else str(cell) for cell in row] for row in rows]
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b", "c"], *written]


def test_all_of_a_list_are_read_page_by_page_up_to_as_many_as_are_wanted(call):
    whole = call("core/api.js", "all", "/v1/jobs")
    assert len(whole) > 3
    assert [job["id"] for job in call("core/api.js", "all", "/v1/jobs", {"limit": 1})] == [job["id"] for job in whole]
    assert len(call("core/api.js", "all", "/v1/jobs", {"limit": 1}, 2)) == 2


@drawn()
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True).map(sorted), st.floats(-10, 1e6 + 10))
def test_nearest_is_the_nearest(call, xs, wanted):
    place = call("charts/scale.js", "nearest", xs, wanted)
    assert abs(xs[place] - wanted) == min(abs(x - wanted) for x in xs)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), ("nan", "–"), (0, "0 s"), (0.00042, "420 us"), (0.0123, "12.3 ms"), (1.254, "1.25 s"),
     (75, "1 min 15 s"), (3 * 3600 + 240, "3 h 4 min"), (15 * 3600, "15 h 0 min"),
     (2 * 86400 + 7200, "2 d 2 h")],
)  # fmt: skip
def test_durations_are_for_people(call, value, text):
    assert call("core/format.js", "duration", value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (80 * 2**30, "80.0 GiB"),
                        (3 * 2**40, "3.00 TiB")]
)  # fmt: skip
def test_bytes_are_in_binary_units(call, value, text):
    assert call("core/format.js", "bytes", value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (4000, "4000"), (1_250_000, "1.25 M"), (3e-5, "3.0e-5"), (-5e29, "-5.0e29")]
)
def test_axes_have_short_numbers(call, value, text):
    assert call("core/format.js", "compact", value) == text


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6, allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@drawn()
@given(st.dictionaries(st.text(max_size=8), DOCUMENTS, max_size=5))
def test_yaml_says_what_the_document_says(call, document):
    from workers.spec.yaml import read_yaml

    assert _close(read_yaml(call("core/yaml.js", "toYaml", document)), document)


def _close(one, other):
    """Equal, whole numbers being written alike in both of JSON's kinds."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    return math.isclose(one, other, rel_tol=1e-12) if numbers else (type(one), one) == (type(other), other)


def test_differences_are_the_fields_that_are_not_alike(call):
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
def test_columns_hold_each_step_once_and_the_newest_value(call, points, parts):
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


def test_curves_that_are_numbers_no_more_say_since_when(call):
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
def test_attention_is_asked_for_what_needs_it(call, changes, state, words):
    ranks = [rank | changes if rank["rank"] == 2 else rank for rank in RANKS]
    job = {"state": state, "generation": 1, "step": 5, "metrics": {"latest": {"loss": 1.0}}}
    notices = call("parts/attention.js", "attention", job, ranks, [])
    assert len(notices) == len(words) and all(word in each["text"] for word, each in zip(words, notices, strict=True))
    job["metrics"]["latest"]["loss"] = "nan"
    assert "nan" in call("parts/attention.js", "attention", job, ranks, [])[-1]["text"]


def test_plans_that_have_drifted_are_reported_until_the_layout_changes(call):
    job = {"state": "RUNNING", "generation": 3, "step": 5, "metrics": {"latest": {"loss": 1.0}}}
    drifted = {"type": "plan_drift", "generation": 1, "message": "a step takes longer", "data": {}}
    recovered, resized = ({"type": "state_changed", "data": {"to": to}} for to in ("RECOVERING", "RESIZING"))
    for events, is_reported in (([drifted, recovered], True), ([drifted, resized], False), ([recovered], False)):
        notices = call("parts/attention.js", "attention", job, RANKS, events)
        assert [each["text"] for each in notices] == (["a step takes longer"] if is_reported else [])


def test_rank_that_takes_longer_than_its_peers_is_said_to(call):
    said = [call("parts/attention.js", "slownessOf", {"own_seconds": own}, 0.2) for own in (0.5, 0.22, None)]
    times = "its own work takes {} a step, the median of its stage 200.0 ms"
    assert said == [f"{times.format('500.0 ms')}: 2.5 times as long", times.format("220.0 ms"), ""]


def test_charts_mark_what_happened_at_a_step_once(call):
    def event(kind, step, to=None):
        return {"type": kind, "step": step, "data": {"to": to}}

    events = [
        event("state_changed", None, "RECOVERING"),
        event("state_changed", 4, "RUNNING"),
        *[event("state_changed", 5, "RECOVERING")] * 2,
        event("step_skipped", 5),
        event("first_step", 6),
    ]
    assert call("parts/job_charts.js", "marksOf", events) == [
        {"step": 5, "label": "recovery", "tone": "warn"},
        {"step": 5, "label": "step skipped", "tone": "bad"},
    ]


def test_labels_that_are_left_out_are_taken_away(call):
    changes = call("parts/actions.js", "labelChanges", {"team": "vision", "old": "1"}, "team=text  new a=b=c")
    assert changes == {"team": "text", "old": None, "new": "", "a": "b=c"}


def test_parts_of_a_step_are_those_that_the_engine_times(call):
    assert set(call("parts/parts_chart.js", "partsOfAStep")) == set(PARTS)
