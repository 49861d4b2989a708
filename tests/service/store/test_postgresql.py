"""What only PostgreSQL does: servers that are away, several writers, commits that nobody answers."""

import contextlib
import os
import signal
import threading

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError

from manta.service.revisions import newest_revision
from manta.service.states import JobState
from manta.service.store import (
    Store,
    checkpoints,
    deletion,
    events,
    generations,
    jobs,
    pauses_and_retries,
    postgresql,
    restored,
)
from manta.service.store.database import may_pass
from manta.service.store.errors import OutcomeUnknown, StoreUnusable
from manta.service.store.postgresql import unsuitable
from manta.workers.config import ParallelConfig
from manta.workers.errors import MantaError

SECONDS = 60.0


@pytest.fixture
def url(postgres):
    """A migrated database."""
    return postgres.url(postgres.shared())


@pytest.fixture
def open_store(url):
    """Opens stores of one database, each with connections of its own, as control planes in several processes have."""
    opened = []

    def make():
        opened.append(Store(url))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def job(open_store, make_spec):
    return open_store().write(lambda session: jobs.create(session, make_spec()))[0]


def say(session, job, message="something"):
    return events.append(session, job.id, "told", message)


def messages(store, after=0):
    with store.read() as session:
        return [(event.id, event.message) for event in events.page_of_all(session, type="told", after_id=after).items]


def test_ids_of_events_are_committed_in_order_whoever_writes(open_store, job):
    slow, quick, reader = open_store(), open_store(), open_store()
    numbered, go_on = threading.Event(), threading.Event()

    def dawdle(session):
        say(session, job, "first")
        numbered.set()
        assert go_on.wait(SECONDS)

    first = slow._submit(dawdle)
    assert numbered.wait(SECONDS)
    second = quick._submit(lambda session: say(session, job, "second"))
    assert messages(reader) == [], "nobody sees an event with a higher id before this one"
    assert not second.done()
    go_on.set()
    first.result(SECONDS), second.result(SECONDS)
    assert [message for _, message in messages(reader)] == ["first", "second"]


def test_locking_a_job_reads_it_afresh_and_keeps_changes_of_the_transaction(open_store, job):
    store, other = open_store(), open_store()

    def operation(session):
        assert jobs.get(session, job.id).state == "QUEUED"
        other.write(lambda theirs: jobs.transition(theirs, job.id, JobState.STARTING))
        locked = jobs.get(session, job.id, lock=True)
        assert locked.state == "STARTING"
        locked.step = 7
        assert jobs.get(session, job.id, lock=True).step == 7

    store.write(operation)
    assert store.query(jobs.get, job.id).step == 7


CHANGES = {
    "transition": lambda session, job: jobs.transition(session, job, JobState.STARTING),
    "cancel": jobs.request_cancel,
    "resize": lambda session, job: jobs.request_resize(session, job, 2),
    "wait": lambda session, job: jobs.set_waiting(session, job, {"needed": 8}),
    "lay out": lambda session, job: jobs.set_layout(session, job, ParallelConfig()),
    "report": lambda session, job: jobs.accept_report(session, job, 0, 0, 1),
    "edit": lambda session, job: jobs.edit(session, job, priority=1),
    "begin a generation": lambda session, job: generations.begin(session, job, "submitted", False),
    "save": lambda session, job: checkpoints.begin(session, job, 0, 5, "/x"),
    "pause": pauses_and_retries.request_pause,
    "retry": pauses_and_retries.request_retry,
    "let memory go": lambda session, job: pauses_and_retries.release_snapshots(session, job, 0.0),
    "delete": deletion.begin,
    "delete if expired": lambda session, job: deletion.begin_if_expired(session, job, 0.0, "old"),
    "note an obstacle": lambda session, job: deletion.record_obstacle(session, job, "in the way"),
    "end a deletion": deletion.end,
    "pause a restored one": restored.pause,
    "know a generation": lambda session, job: restored.know_generation(session, job, 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_job_locks_it_before_reading_it(open_store, job, change):
    statements = []

    def operation(session):
        connection = session.connection()
        listen(connection, "before_cursor_execute", lambda _c, _k, statement, *_more: statements.append(statement))
        with contextlib.suppress(MantaError):
            change(session, job.id)

    open_store().write(operation)
    assert "FOR NO KEY UPDATE" in next(each for each in statements if "FROM jobs" in each)


def test_event_of_a_job_that_another_store_has_locked_is_written_at_once(open_store, job):
    store, other = open_store(), open_store()

    def operation(session):
        jobs.get(session, job.id, lock=True)
        other.write(lambda theirs: say(theirs, job))

    store.write(operation)
    assert len(messages(store)) == 1


def test_writes_that_lock_each_other_out_are_retried_and_both_succeed(open_store, job, make_spec):
    one, other = open_store(), open_store()
    second = one.write(lambda session: jobs.create(session, make_spec()))[0]
    both = threading.Barrier(2)
    tries = []

    def cross(first, last):
        def operation(session):
            tries.append(first.id)
            jobs.get(session, first.id, lock=True).step += 1
            session.flush()
            if len(tries) <= 2:
                both.wait(SECONDS)
            jobs.get(session, last.id, lock=True).step += 1

        return operation

    writes = [one._submit(cross(job, second)), other._submit(cross(second, job))]
    for write in writes:
        write.result(SECONDS)
    assert len(tries) > 2
    with one.read() as session:
        assert [jobs.get(session, each.id).step for each in (job, second)] == [2, 2]


def backends(postgres, url):
    name = url.partition("@/")[2].partition("?")[0]
    rows = postgres.execute(f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'manta'")
    return [pid for (pid,) in rows]


def commit_and_lose_the_answer(monkeypatch, committed=True):
    """The connection of the next commit is lost, before or after the server has made it."""
    original = psycopg.Connection.commit

    def commit(connection):
        monkeypatch.setattr(psycopg.Connection, "commit", original)
        if committed:
            original(connection)
        connection.pgconn.finish()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(psycopg.Connection, "commit", commit)


def test_commit_whose_answer_is_lost_after_it_was_made_is_not_repeated(open_store, job, monkeypatch):
    store = open_store()
    commit_and_lose_the_answer(monkeypatch)
    assert store.write(lambda session: say(session, job)) > 0
    assert len(messages(store)) == 1


def test_a_commit_that_is_not_answered_and_not_made_is_an_error_that_may_pass(open_store, job, monkeypatch):
    store = open_store()
    commit_and_lose_the_answer(monkeypatch, committed=False)
    with pytest.raises(OperationalError) as caught:
        store.write(lambda session: say(session, job))
    assert not isinstance(caught.value, OutcomeUnknown) and may_pass(caught.value)
    assert messages(store) == []


def test_commit_whose_outcome_cannot_be_asked_for_raises_outcome_unknown(open_store, job, monkeypatch):
    store = open_store()
    monkeypatch.setattr(postgresql, "OUTCOME_SECONDS", 0.0)
    commit_and_lose_the_answer(monkeypatch)
    connect = store.database.writer.connect
    calls = iter([connect])

    def connect_once():
        return next(calls, refuse)()

    def refuse():
        raise OperationalError(None, None, Exception("connection refused"))

    monkeypatch.setattr(store.database.writer, "connect", connect_once)
    with pytest.raises(OutcomeUnknown) as caught:
        store.write(lambda session: say(session, job))
    assert may_pass(caught.value)


def test_connections_closed_by_the_server_fail_no_request(open_store, job, postgres, url):
    store = open_store()
    store.ping()
    store.write(lambda session: say(session, job))
    for pid in backends(postgres, url):
        postgres.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
    store.ping()
    store.write(lambda session: say(session, job))
    assert len(messages(store)) == 2


def test_a_server_that_stands_still_is_an_error_and_no_thread_that_waits_for_ever(open_store):
    stopped = []

    def ask(session):
        driver = session.connection().connection.driver_connection
        assert driver.answer_seconds == postgresql.ANSWER_SECONDS
        stopped.append(session.scalar(text("SELECT pg_backend_pid()")))
        os.kill(stopped[0], signal.SIGSTOP)
        driver.answer_seconds = 0.3  # only now: a server that is merely slow may take longer
        session.scalar(text("SELECT 1"))

    try:
        with pytest.raises(OperationalError, match=r"the server gave no answer in 0\.3 s") as caught:
            open_store().write(ask)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert may_pass(caught.value) and caught.value.connection_invalidated


def test_control_planes_that_start_at_once_migrate_once(postgres):
    name = postgres.make_empty()
    stores = [Store(postgres.url(name)) for _ in range(3)]
    threads = [threading.Thread(target=store.migrate) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for store in stores:
        assert store.revision == newest_revision()
        store.close()
    assert postgres.execute("SELECT count(*) FROM installation", name) == [(1,)]
    postgres.drop(name)


def test_ids_of_jobs_are_in_the_order_of_their_characters_in_every_language(postgres, url):
    name = url.partition("@/")[2].partition("?")[0]
    column = "(table_schema, table_name, column_name) = ('public', 'jobs', 'id')"
    query = f"SELECT collation_name FROM information_schema.columns WHERE {column}"
    assert postgres.execute(query, name) == [("C",)]


def test_texts_with_nul_or_surrogates_are_stored_escaped_in_postgresql(open_store, job):
    store = open_store()
    odd = "a\0b\ud800c"
    store.write(lambda s: events.append(s, job.id, "told" + "x" * 100, odd, data={odd: [float("nan"), odd]}))
    with store.read() as session:
        (event,) = [each for each in events.page(session, job.id).items if each.type.startswith("told")]
        assert events.page_of_all(session, type="a\0").items == []
    assert (event.message, len(event.type)) == ("a\\x00b\\ud800c", 64)
    assert event.data == {"a\\x00b\\ud800c": ["nan", "a\\x00b\\ud800c"]}


def refusal(url):
    store = Store(url)
    with pytest.raises(StoreUnusable) as caught:
        store.migrate()
    store.close()
    return str(caught.value)


def test_unusable_database_is_reported_in_one_sentence_without_the_password(postgres, tmp_path):
    missing = refusal(postgres.url("nowhere").replace("manta@", "manta:secret@"))
    assert missing.startswith("cannot use the database postgresql://manta:***@/nowhere?host=")
    assert missing.endswith("(make it: createdb nowhere)")
    away = refusal("postgresql://me:secret@127.0.0.1:1/manta")
    assert "Connection refused" in away and away.endswith(
        "(is the server running, and does it listen on that address?)"
    )
    gone = refusal(f"postgresql://me:secret@/manta?host={tmp_path}&password=secret")
    assert "is the server running, and is its socket there?" in gone
    for sentence in (missing, away, gone):
        assert "secret" not in sentence and "\n" not in sentence


def test_wrong_password_is_reported_with_advice_and_not_shown(postgres):
    postgres.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
    rules = postgres.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("local all guarded scram-sha-256\n" + before)
    postgres.execute("SELECT pg_reload_conf()")
    try:
        url = postgres.url("postgres")
        said = refusal(url.replace("manta@", "guarded:wrong@"))
        assert "(check user and password in its URL, or in PGPASSFILE's file)" in said
        assert "wrong" not in said
        assert "put the password into its URL" in refusal(url.replace("manta@", "guarded@"))
    finally:
        rules.write_text(before)
        postgres.execute("SELECT pg_reload_conf()")


def test_servers_that_are_too_old_and_encodings_without_all_characters_are_refused():
    assert unsuitable(140_000, "UTF8") is None
    assert unsuitable(130_012, "UTF8") == "its server is PostgreSQL 13.12, and Manta needs 14 or later"
    assert unsuitable(90_624, "UTF8") == "its server is PostgreSQL 9, and Manta needs 14 or later"
    assert "its encoding is SQL_ASCII" in unsuitable(150_000, "SQL_ASCII")


def test_missing_tables_of_a_restore_under_way_are_an_error_that_may_pass(open_store, postgres, url, job):
    store, name = open_store(), url.split("?")[0].rsplit("/", 1)[1]
    postgres.execute("ALTER SCHEMA public RENAME TO away", name)
    try:
        for operation in (lambda: messages(store), lambda: store.write(lambda session: say(session, job))):
            with pytest.raises(OperationalError, match="does not exist") as missing:
                operation()
            assert may_pass(missing.value)
    finally:
        postgres.execute("ALTER SCHEMA away RENAME TO public", name)
    store.write(lambda session: say(session, job))
    assert [message for _, message in messages(store)] == ["something"]


def test_lifting_time_limits_for_one_transaction_leaves_those_of_the_next(open_store):
    store = open_store()

    def limits(connection):
        asked = [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in ("statement_timeout", "lock_timeout")]
        return [*asked, connection.connection.driver_connection.answer_seconds]

    with store.engine.begin() as connection:
        store.database.disable_time_limit(connection)
        assert limits(connection) == ["0", "0", None]
    with store.engine.begin() as connection:
        assert limits(connection) == ["20s", "10s", postgresql.ANSWER_SECONDS]


def test_same_submission_to_two_control_planes_creates_one_job(open_store, make_spec):
    spec, begun = make_spec(), threading.Barrier(2)

    def submit(session):
        session.execute(text("SELECT 1"))
        begun.wait(SECONDS)
        return jobs.create(session, spec, "a key", "a digest")

    writes = [open_store()._submit(submit) for _ in range(2)]
    made = [write.result(SECONDS) for write in writes]
    assert len({job.id for job, _ in made}) == 1
    assert sorted(new for _, new in made) == [False, True]


def test_server_options_in_the_url_override_the_defaults(url):
    store = Store(f"{url}&options=-c%20statement_timeout%3D15s&application_name=mine")
    with store.read() as session:
        asked = [session.scalar(text(f"SHOW {name}")) for name in ("statement_timeout", "lock_timeout")]
        assert [*asked, session.scalar(text("SHOW application_name"))] == ["15s", "10s", "mine"]
    store.close()
