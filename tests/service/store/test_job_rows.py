"""Rows of jobs: pages, their cursors, filters and orders."""

import base64
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import String

from manta.service.states import JobState
from manta.service.store import audit, checkpoints, job_rows, jobs, keys, projects, recoveries
from manta.service.store.errors import ForeignCursor, InvalidCursor, JobNotFound
from manta.service.store.job_rows import EVERY_JOB, NEWEST_FIRST, JobFilter, JobOrder
from manta.service.store.paging import Cursors, Page
from manta.service.store.tables import Job
from manta.service.store.types import AnyText, Document, Numbers, ShortText


def test_pages_are_newest_first_and_complete_while_jobs_arrive(store, submit):
    ids = [submit().id for _ in range(5)]
    with store.read_rows() as connection:
        assert job_rows.page(connection, limit=5).next_cursor is None
    seen = listed(store, after_page=submit)  # which must neither shift nor repeat anything
    assert [job.id for job in seen] == ids[::-1]


def test_pages_filter_by_state_and_name(store, submit):
    first, second = submit(name="a"), submit(name="b")
    store.write(lambda session: jobs.transition(session, first.id, JobState.STARTING))
    with store.read_rows() as connection:
        assert [job.id for job in job_rows.page(connection, JobFilter(states=("STARTING",))).items] == [first.id]
        assert [job.id for job in job_rows.page(connection, JobFilter(name="b")).items] == [second.id]
        assert job_rows.page(connection, JobFilter(states=("PAUSED",))).items == []


def test_jobs_asked_for_by_id_are_listed_newest_first(store, submit):
    first, _, third = submit(), submit(), submit()
    with store.read_rows() as connection:
        rows = job_rows.understood(connection, [first.id, "job_000000000000", third.id])
    assert [row.id for row in rows] == [third.id, first.id]


@pytest.mark.parametrize("cursor", ["?", "AAAA", "é", "am9iXw", "a"])
def test_invalid_cursor_of_job_pages_is_refused(store, cursor):
    with store.read_rows() as connection, pytest.raises(InvalidCursor):
        job_rows.page(connection, cursor=cursor)


def test_a_row_is_equal_as_long_as_nothing_that_is_shown_has_changed(store, submit):
    job_id = submit().id

    def row():
        with store.read_rows() as connection:
            return job_rows.one(connection, job_id)

    def store_as(name, value):
        store.write(lambda session: setattr(jobs.get(session, job_id), name, value))

    assert row() == row()
    for column in Job.__table__.columns:
        if column.key in {"id", "project", "idempotency_key"}:
            continue
        before = row()
        store_as(column.key, _another(column.type))
        assert (row() == before) is (column.key in job_rows.NOT_SHOWN | job_rows.FOLLOWS), column.key


@pytest.mark.parametrize("change", [{"name": "another"}, {"priority": 7}, {"labels": {"a": "b"}}])
def test_edit_that_changes_the_spec_changes_the_row_in_lists(store, submit, change):
    job_id = submit().id
    with store.read_rows() as connection:
        before = job_rows.one(connection, job_id)
    spec = store.write(lambda session: dict(jobs.get(session, job_id).spec))
    assert store.write(lambda session: dict(jobs.edit(session, job_id, **change).spec)) != spec
    with store.read_rows() as connection:
        assert job_rows.one(connection, job_id) != before


def _another(kind):
    if isinstance(kind, Document | Numbers):
        return {"changed": 1}
    return "CHANGED" if isinstance(kind, String | ShortText | AnyText) else 7


def test_reading_the_row_of_an_unknown_job_raises_job_not_found(store):
    with store.read_rows() as connection:
        for job_id in ("job_000000000000", "../../etc/passwd", ""):
            with pytest.raises(JobNotFound):
                job_rows.one(connection, job_id)


SORTS = ("created", "name", "state", "step", "loss", "priority", "finished")
LOSSES = (2.5, math.nan, None, 2.5, -math.inf, 0.1 + 0.2, math.inf, None, 3)


@pytest.fixture
def some(store, submit):
    """Nine jobs; by number."""
    ids = []
    for number, loss in enumerate(LOSSES):
        job_id = submit(name=f"Run {number % 3}", priority=number % 4, labels={"team": f"t{number % 2}", "n": ""}).id
        if number % 3 == 0:
            store.write(lambda session, job_id=job_id: jobs.transition(session, job_id, JobState.CANCELLED))

        def move(session, job_id=job_id, step=number * 5 % 7, loss=loss, number=number):
            job = jobs.get(session, job_id)
            job.step, job.owner = step, "ada" if number % 2 else "bob"
            job.metrics = {} if loss is None else {"loss": loss, "step": step}

        store.write(move)
        ids.append(job_id)
    return ids


def listed(store, wanted=EVERY_JOB, order=NEWEST_FIRST, limit=2, after_page=lambda: None):
    seen, cursor = [], None
    while True:
        with store.read_rows() as connection:
            page = job_rows.page(connection, wanted, order, limit, cursor)
        seen += page.items
        after_page()
        cursor = page.next_cursor
        if cursor is None:
            return seen


def test_pages_in_any_order_have_each_job_once_and_unknown_ones_last(store, some):
    for sort, descending in itertools.product(SORTS, (False, True)):
        check_order(store, some, sort, descending)


def check_order(store, some, sort, descending):
    rows = listed(store, order=JobOrder(sort, descending))
    assert sorted(row.id for row in rows) == some

    def key(row):
        value = LOSSES[some.index(row.id)] if sort == "loss" else row.finished_at
        if sort in ("loss", "finished"):
            return None if value is None else (math.isnan(value), 0 if math.isnan(value) else value)
        return row.id if sort == "created" else getattr(row, sort)

    known = [row for row in rows if key(row) is not None]
    assert rows[: len(known)] == known, "unknown ones come last"
    assert known == sorted(known, key=lambda row: (key(row), row.id), reverse=descending)
    unknown = [row.id for row in rows[len(known) :]]
    assert unknown == sorted(unknown, reverse=descending)


FILTERED = [
    (JobFilter(states=("CANCELLED",)), {0, 3, 6}), (JobFilter(states=("CANCELLED", "QUEUED")), set(range(9))),
    (JobFilter(name="Run 1"), {1, 4, 7}), (JobFilter(name="run 1"), set()), (JobFilter(search="rUN 1"), {1, 4, 7}),
    (JobFilter(search="JOB_"), set(range(9))), (JobFilter(search="%"), set()), (JobFilter(search="R_n"), set()),
    (JobFilter(search="/"), set()), (JobFilter(labels=(("team", "t1"),)), {1, 3, 5, 7}),
    (JobFilter(labels=(("team", None), ("n", ""))), set(range(9))),
    (JobFilter(labels=(("team", "t1"), ("team", "t0"))), set()), (JobFilter(labels=(("other", None),)), set()),
    (JobFilter(owner="ada", name="Run 1"), {1, 7}), (JobFilter(owner="ada", labels=(("team", "t0"),)), set()),
    (JobFilter(bound="other"), set()),
    (JobFilter(bound="default", states=("QUEUED",), search="n 2", labels=(("n", None),)), {2, 5, 8}),
]  # fmt: skip
"""Filters, and the jobs that they leave. What is searched for has a blank, since ids have digits and letters too."""


def test_jobs_are_listed_and_counted_by_all_filters_together(store, some):
    for wanted, numbers in FILTERED:
        for sort in ("created", "loss"):
            assert {some.index(row.id) for row in listed(store, wanted, JobOrder(sort), 4)} == numbers, wanted
        with store.read_rows() as connection:
            counted = job_rows.counts(connection, wanted)
        cancelled = len(numbers & {0, 3, 6})
        expected = {"CANCELLED": cancelled, "QUEUED": len(numbers) - cancelled}
        assert counted == {state: count for state, count in expected.items() if count}, wanted


def test_pages_of_jobs_as_text_have_the_same_jobs_in_the_same_order(store, some):
    for sort, descending in itertools.product(SORTS, (False, True)):
        order = JobOrder(sort, descending)
        with store.read_rows() as connection:
            page = job_rows.page(connection, JobFilter(), order, 4)
            text = job_rows.page_as_text(connection, JobFilter(), order, 4)
            following = job_rows.page_as_text(connection, JobFilter(), order, 4, page.next_cursor)
        places = [text.index(row.id) for row in page.items]
        assert places == sorted(places)
        assert not any(row.id in following for row in page.items)


def test_jobs_are_found_by_their_current_labels(store, some):
    store.write(lambda session: jobs.edit(session, some[0], labels={"team": None, "new": "yes"}))
    assert {row.id for row in listed(store, JobFilter(labels=(("new", "yes"),)))} == {some[0]}
    assert some[0] not in {row.id for row in listed(store, JobFilter(labels=(("team", None),)))}


@pytest.mark.parametrize(
    ("sort", "place"),
    [
        ("created", "job_x"), ("name", "[1, \"job_000000000000\"]"), ("step", '["1", "job_000000000000"]'),
        ("step", "[true, \"job_000000000000\"]"), ("step", f'[{2**63}, "job_000000000000"]'), ("step", "[null, 5]"),
        ("step", '[null, "job_000000000000"]'), ("loss", '["nan", "job_000000000000"]'), ("loss", "[1e999, \"x\"]"),
        ("loss", '[1e999, "job_000000000000"]'), ("finished", "[[], \"job_000000000000\"]"), ("finished", "{}"),
        ("finished", "[" * 5000), ("state", "5"), ("priority", ""),
    ],
)  # fmt: skip
def test_cursor_with_a_place_that_no_page_gave_out_is_refused(store, sort, place):
    order = JobOrder(sort)
    cursor = Cursors("jobs", **({} if sort == "created" else {"order": f"{sort} True"})).encode(place)
    with store.read_rows() as connection, pytest.raises(InvalidCursor) as refused:
        job_rows.page(connection, JobFilter(), order, 50, cursor)
    assert "another filter" not in str(refused.value)


EVERYTHING = {"bound": None}
texts = st.text("job_19 :,.é", max_size=20)
filters = st.dictionaries(st.sampled_from(["state", "name", "job"]), st.none() | texts | st.integers())


@given(texts, filters)
def test_cursor_reads_back_its_text_and_is_safe_in_urls(text, given):
    cursor = Cursors("jobs", **given).encode(text)
    assert cursor.replace("-", "").replace("_", "").isalnum()
    valued = {key: value for key, value in given.items() if value is not None}
    assert Cursors("jobs", **given).decode(cursor) == Cursors("jobs", **valued).decode(cursor) == text


@pytest.mark.parametrize(
    ("name", "filter"),
    [
        ("jobs", {}),
        ("jobs", {"state": "QUEUED", "name": "a"}),
        ("jobs", {"name": "QUEUED"}),
        ("events", {"state": "QUEUED"}),
    ],
)
def test_cursor_of_another_list_or_filter_is_refused(name, filter):
    held = Cursors(name, **filter).encode("job_000000000001")
    with pytest.raises(ForeignCursor, match="another list, or to this one with another filter; repeat the request"):
        Cursors("jobs", state="QUEUED").decode(held)


def old(text):
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor", ["", "?", "a", "AAAA", "é", old("job_000000000001"), old("17"), old("0:5,1:7"), old("g0000000.x")]
)
def test_cursor_that_this_release_did_not_make_is_refused(cursor):
    with pytest.raises(InvalidCursor, match="start again without one"):
        Cursors("jobs").decode(cursor)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "9" * 19 + "9", str(2**63), "١"])
def test_cursor_that_holds_no_valid_number_is_refused(text):
    cursors = Cursors("events")
    with pytest.raises(InvalidCursor):
        cursors.decode_number(cursors.encode(text))
    assert cursors.decode_number(cursors.encode(str(2**63 - 1))) == 2**63 - 1


def test_page_has_a_next_cursor_only_if_more_items_follow():
    cursors = Cursors("numbers")
    page = Page.of([1, 2, 3], 2, cursors, str)
    assert (page.items, cursors.decode(page.next_cursor)) == ([1, 2], "2")
    assert Page.of([1, 2], 2, cursors, str).next_cursor is None


@pytest.mark.parametrize(
    ("page", "name", "held", "given"),
    [
        *((audit.page, "audit", "1", {**EVERYTHING, key: "x"}) for key in ("bound", "key_id", "target")),
        (keys.page, "keys", "key_000000000000", {"bound": "x"}),
        (projects.page, "projects", "default", {"bound": "x"}),
        (checkpoints.page, "checkpoints", "50 1", {"job_id": "job_1"}),
        (recoveries.page, "recoveries", "1", {"job_id": "job_1"}),
    ],
)
def test_every_list_binds_its_cursors_to_each_of_its_filters(store, page, name, held, given):
    with store.read() as session, pytest.raises(ForeignCursor):
        page(session, **given, cursor=Cursors(name).encode(held))


@pytest.mark.parametrize(
    "filter",
    [
        *({"states": ("PAUSED",)}, {"name": "x"}, {"bound": "x"}, {"search": "x"}, {"owner": "x"}),
        {"labels": (("x", None),)},
    ],
)
def test_list_of_jobs_binds_its_cursors_to_each_of_its_filters(store, filter):
    cursor = Cursors("jobs").encode("job_000000000000")
    with store.read_rows() as connection:
        assert job_rows.page(connection, cursor=cursor).items == []
        with pytest.raises(ForeignCursor):
            job_rows.page(connection, JobFilter(**filter), cursor=cursor)
        with pytest.raises(ForeignCursor):
            job_rows.page(connection, order=JobOrder(descending=False), cursor=cursor)
