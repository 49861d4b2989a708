"""What databases refuse is stored as words, and all else as it is."""

import math

import pytest

from manta.service.store import jobs
from manta.service.store.types import Document, storable


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"text": "a\0b"}, {"text": "a\\x00b"}),
        ({"a\0": 1}, {"a\\x00": 1}),
        ({"text": "\ud83d"}, {"text": "\\ud83d"}),
        ({"text": "\U0001f600 \\u0000"}, {"text": "\U0001f600 \\u0000"}),
        ({"list": [math.nan, -math.inf, 1e308]}, {"list": ["nan", "-inf", 1e308]}),
        ({"plain": ["ü", 1, 2.5, None, True]}, {"plain": ["ü", 1, 2.5, None, True]}),
    ],
)
def test_documents_come_back_with_all_that_a_database_takes(store, submit, given, stored):
    job = submit()

    def change(session):
        jobs.get(session, job.id).waiting_for = given

    store.write(change)
    with store.read() as session:
        assert jobs.get(session, job.id).waiting_for == stored
    assert storable(stored) == stored


def test_document_that_needs_no_change_is_stored_without_a_copy(store):
    plain = {"a": [1, "text"]}
    assert Document().process_bind_param(plain, store.engine.dialect) is plain
