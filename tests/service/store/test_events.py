"""Events tell a job's story in order, and a reader can go on where it stopped."""

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from manta.service.store import events, jobs
from manta.service.store.errors import InvalidCursor
from manta.service.store.paging import MAX_INTEGER


def test_pages_of_events_continue_after_an_id_and_hold_one_job(store, submit):
    job, other = submit(), submit()
    for number in range(5):
        store.write(lambda session, n=number: events.append(session, job.id, "tick", f"tick {n}", step=n))
        store.write(lambda session: events.append(session, other.id, "noise", "noise"))
    seen, after = [], 0
    while after is not None:
        page = store.query(events.page, job.id, after, limit=2)
        seen += [event.message for event in page.items]
        after = page.next_cursor and events.cursors(job.id).decode_number(page.next_cursor)
    assert seen[1:] == [f"tick {n}" for n in range(5)]


def test_event_is_stored_with_all_its_fields(store, submit):
    job = submit()
    data = {"loss": float("nan"), "ranks": [1, 2]}
    event_id = store.write(
        lambda session: events.append(session, job.id, "odd", "odd", generation=2, rank=3, step=4, data=data, at=5.5)
    )
    stored = store.query(events.page, job.id, event_id - 1).items[0]
    assert (stored.generation, stored.rank, stored.step, stored.time) == (2, 3, 4, 5.5)
    assert stored.data == {"loss": "nan", "ranks": [1, 2]}


def test_event_data_of_one_type_and_job_is_found_in_order(store, submit):
    job, other = submit(), submit()

    def tell(of, kind, number):
        return store.write(lambda session: events.append(session, of.id, kind, "said", data={"to": number}))

    ids = [
        tell(job, "rolled_back", 1),
        tell(other, "rolled_back", 2),
        tell(job, "told", 3),
        tell(job, "rolled_back", 4),
    ]
    assert ids == sorted(ids)
    assert store.query(events.data_of, job.id, "rolled_back") == [{"to": 1}, {"to": 4}]


def test_said_since_finds_a_message_only_after_the_last_event_of_another_type(store, submit):
    job, other = submit(), submit()

    def said(text, since="first_step"):
        return store.query(events.has_event_since, job.id, "held", text, since)

    def tell(kind, text, of=job):
        store.write(lambda session: events.append(session, of.id, kind, text))

    tell("held", "why", of=other)
    assert not said("why")
    tell("held", "why")
    assert said("why") and not said("another reason")
    tell("first_step", "step 1", of=other)
    assert said("why"), "of another job"
    tell("first_step", "step 1")
    assert not said("why"), "that was before"
    tell("held", "why")
    assert said("why")


def test_newest_event_ids_are_known_by_job_and_overall(store, submit):
    assert store.query(events.newest) == 0
    job, other = submit(), submit()
    seen = store.write(lambda session: events.append(session, job.id, "tick", "a"))
    last = store.write(lambda session: events.append(session, other.id, "tick", "b"))
    with store.read() as session:
        assert (events.newest(session), events.newest_of_jobs(session, seen)) == (last, {other.id: last})
        assert events.newest_of_jobs(session, 0) == {job.id: seen, other.id: last}


def test_events_of_all_jobs_are_filtered_and_paged_by_cursors_of_the_same_filter(store, submit):
    job, other = submit(), submit()
    for number in range(3):
        for each in (job, other):
            store.write(lambda session, each=each, n=number: events.append(session, each.id, "tick", f"{n}"))
            store.write(lambda session, each=each: events.append(session, each.id, "noise", "noise"))
    with store.read() as session:
        first = events.page_of_all(session, job.id, "tick", limit=2)
        after = events.cursors_of_all(job.id, "tick").decode_number(first.next_cursor)
        rest = events.page_of_all(session, job.id, "tick", after, limit=2)
        nothing = events.page_of_all(session, bound="another project").items
    assert [(event.job_id, event.message) for event in first.items + rest.items] == [(job.id, str(n)) for n in range(3)]
    assert (rest.next_cursor, nothing) == (None, [])
    for another in (events.cursors_of_all(other.id, "tick"), events.cursors_of_all(job.id, "noise")):
        with pytest.raises(InvalidCursor):
            another.decode_number(first.next_cursor)


@pytest.mark.parametrize("looked_at", [0, 100])
def test_events_of_a_project_are_those_of_its_jobs_however_they_are_found(store, make_spec, monkeypatch, looked_at):
    monkeypatch.setattr(events, "_SCANNED_EVENTS", looked_at)
    mine, other = (store.write(lambda s, to=to: jobs.create(s, make_spec(), project=to))[0] for to in ("mine", "other"))
    for number in range(3):
        for job in (mine, other):
            store.write(lambda session, job=job, n=number: events.append(session, job.id, "tick", f"{n}"))
    with store.read() as session:
        first = events.page_of_all(session, type="tick", limit=2, bound="mine")
        rest = events.page_of_all(session, after_id=first.items[-1].id, bound="mine")
        assert events.page_of_all(session, after_id=MAX_INTEGER, bound="mine").items == []
        of_job = [events.page_of_all(session, mine.id, "tick", bound=bound).items for bound in ("mine", "other")]
    assert [(each.job_id, each.message) for each in first.items + rest.items] == [(mine.id, str(n)) for n in range(3)]
    assert list(map(len, of_job)) == [3, 0]


def test_a_transaction_takes_its_place_in_the_order_of_events_once(store, submit):
    job, statements = submit(), list[str]()
    event.listen(store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))

    def tell(session):
        for number in range(3):
            events.append(session, job.id, "tick", f"tick {number}")
        taken.append(sum("pg_advisory_xact_lock" in statement for statement in statements))
        statements.clear()

    def tell_in_two_transactions(session):
        tell(session)
        session.commit()
        tell(session)

    taken = list[int]()
    once = 1 if store.engine.dialect.name == "postgresql" else 0
    store.write(tell)
    with Session(store.engine) as session:
        tell_in_two_transactions(session)
        session.commit()
    assert taken == [once] * 3
