"""Events tell a job's story in order, and a reader can go on where it stopped."""

from service.store import events


def test_pages_go_on_after_an_id_and_belong_to_one_job(store, submit):
    job, other = submit(), submit()
    for number in range(5):
        store.write(lambda session, n=number: events.append(session, job.id, "tick", f"tick {n}", step=n))
        store.write(lambda session: events.append(session, other.id, "noise", "noise"))
    seen, after = [], 0
    while True:
        with store.read() as session:
            page = events.page(session, job.id, after, limit=2)
        seen += [event.message for event in page.items]
        if page.next_cursor is None:
            break
        after = events.cursors(job.id).decode_number(page.next_cursor)
    assert seen[1:] == [f"tick {n}" for n in range(5)]


def test_an_event_keeps_what_it_was_told(store, submit):
    job = submit()
    data = {"loss": float("nan"), "ranks": [1, 2]}
    event = store.write(
        lambda session: events.append(session, job.id, "odd", "odd", generation=2, rank=3, step=4, data=data, at=5.5)
    )
    with store.read() as session:
        stored = events.page(session, job.id, event.id - 1).items[0]
    assert (stored.generation, stored.rank, stored.step, stored.time) == (2, 3, 4, 5.5)
    assert stored.data == {"loss": "nan", "ranks": [1, 2]}


def test_what_was_said_since_something_else_is_known(store, submit):
    job, other = submit(), submit()

    def said(text, since="first_step"):
        with store.read() as session:
            return events.said_since(session, job.id, "held", text, since)

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
