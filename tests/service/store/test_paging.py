"""Cursors are opaque, and good only for the list and the filter that they were made for."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.store import audit, checkpoints, job_rows, keys, projects, recoveries
from manta.service.store.errors import ForeignCursor, InvalidCursor
from manta.service.store.job_rows import JobFilter, JobOrder
from manta.service.store.paging import Cursors, Page

EVERYTHING = {"bound": None}
texts = st.text("job_19 :,.é", max_size=20)
filters = st.dictionaries(st.sampled_from(["state", "name", "job"]), st.none() | texts | st.integers())


@given(texts, filters)
def test_cursor_reads_back_its_text_and_is_safe_in_urls(text, given):
    cursor = Cursors("jobs", **given).encode(text)
    assert cursor.replace("-", "").replace("_", "").isalnum()
    assert Cursors("jobs", **given).decode(cursor) == text


@pytest.mark.parametrize(
    "other",
    [
        Cursors("jobs"),
        Cursors("jobs", state="QUEUED", name="a"),
        Cursors("jobs", name="QUEUED"),
        Cursors("events", state="QUEUED"),
    ],
)
def test_cursor_of_another_list_or_filter_is_refused(other):
    with pytest.raises(ForeignCursor, match="another list, or to this one with another filter; repeat the request"):
        Cursors("jobs", state="QUEUED").decode(other.encode("job_000000000001"))


def test_cursor_ignores_a_filter_without_a_value():
    assert Cursors("jobs").decode(Cursors("jobs", state=None).encode("x")) == "x"


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
