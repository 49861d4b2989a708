"""Whether a database is sound, and what becomes of jobs in one that was restored."""

import contextlib
import sqlite3

import pytest
from sqlalchemy import text

from manta.service.revisions import newest_revision
from manta.service.states import JobState
from manta.service.store import Store, events, generations, health, jobs, ranks, restored
from manta.service.store.errors import StoreUnusable


def run(store, *statements):
    for statement in statements:
        store.write(lambda session, statement=statement: session.execute(text(statement)))


def test_a_database_that_was_just_made_is_sound(store):
    assert health.problems(store) == []


def test_schema_that_differs_from_the_code_is_reported(store):
    run(store, "ALTER TABLE jobs ADD COLUMN odd INTEGER", "DROP TABLE ranks")
    problems = " ".join(health.problems(store))
    assert "remove_column" in problems and "odd" in problems
    assert "add_table" in problems and "ranks" in problems


def test_older_revision_is_reported_with_the_upgrade_command(store):
    run(store, "UPDATE alembic_version SET version_num = '0006'")
    said = f"its revision is 0006, and that of this release {newest_revision()}: `manta db upgrade`"
    assert health.problems(store) == [said]


def test_health_check_reports_a_missing_installation_row(store):
    run(store, "DELETE FROM installation")
    assert health.problems(store) == ["installation has 0 rows, and must have one"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        (b"", "it has neither jobs nor tables"),
        (b"no database at all" * 1000, "not a database"),
    ],
)
def test_file_that_is_not_a_job_database_is_reported(tmp_path, content, said):
    if content is not None:
        (tmp_path / "new.db").write_bytes(content)
    with contextlib.closing(Store(f"sqlite:///{tmp_path}/new.db")) as store, pytest.raises(StoreUnusable, match=said):
        health.problems(store)
    assert (tmp_path / "new.db").exists() == (content is not None)


def test_health_check_of_an_unreachable_database_server_asks_whether_it_is_running():
    url = "postgresql://me@127.0.0.1:1/manta"
    with contextlib.closing(Store(url)) as store, pytest.raises(StoreUnusable, match="is the server running"):
        health.problems(store)


def test_health_check_reports_rows_of_a_job_that_does_not_exist(tmp_path, empty_database):
    file = tmp_path / "manta.db"
    file.write_bytes(empty_database.read_bytes())
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO state_changes (job_id, time, state) VALUES ('job_000000000000', 1.0, 'QUEUED')")
    with contextlib.closing(Store(f"sqlite:///{file}")) as store:
        assert health.problems(store) == ["row 1 of state_changes belongs to nothing in jobs"]


@pytest.mark.parametrize(
    ("since", "unsettled"),
    [
        ((), True),
        (("resize_requested",), True),
        (("generation_started",), False),
        (("adopted",), False),
        (("database_older",), False),
        (("adopted", restored.RESTORED), True),  # once more
    ],
)
def test_job_is_settled_once_something_of_it_was_seen_to_run(store, submit, since, unsettled):
    job = submit()
    assert store.write(lambda s: restored.unsettled(s, job.id)) is False, "it was never restored"
    for kind in (restored.RESTORED, *since):
        store.write(lambda s, kind=kind: events.append(s, job.id, kind, "it happened"))
    assert store.write(lambda s: restored.unsettled(s, job.id)) is unsettled


@pytest.mark.parametrize(
    ("path", "paused"),
    [
        ((), False),
        ((JobState.STARTING,), True),
        ((JobState.STARTING, JobState.RUNNING), True),
        ((JobState.STARTING, JobState.PAUSING), True),
        ((JobState.STARTING, JobState.SUCCEEDED), False),
        ((JobState.STARTING, JobState.CANCELLING), False),
    ],
)
def test_restored_job_is_paused_only_if_its_state_can_be_paused(store, submit, path, paused):
    job = submit()
    for state in path:
        store.write(lambda s, state=state: jobs.transition(s, job.id, state))
    place = {"tensor": 0, "pipeline": 0, "data": 0, "context": 0}
    rows = [{"rank": 0, "generation": 1, "state": "running", "node": "n", "device": "cpu", "pid": 7, **place}]
    store.write(lambda s: ranks.replace(s, job.id, rows))
    assert store.write(lambda s: restored.pause(s, job.id)) is paused
    with store.read() as session:
        restored_job = jobs.get(session, job.id)
        assert [rank.state for rank in ranks.of_job(session, job.id)] == ["exited" if paused else "running"]
    before = path[-1] if path else JobState.QUEUED
    assert restored_job.state == (JobState.PAUSED if paused else before)
    assert not paused or (restored_job.reason, restored_job.message.count("manta resume " + job.id)) == (
        restored.RESTORED,
        1,
    )


def test_generation_of_a_checkpoint_on_disk_raises_the_jobs_and_never_lowers_it(store, submit):
    job = submit()
    for known, number in ((3, 3), (2, 3), (5, 5)):
        store.write(lambda s, known=known: restored.know_generation(s, job.id, known))
        assert store.query(jobs.get, job.id).generation == number


def test_gang_unknown_to_a_restored_database_is_recorded_rank_by_rank(store, submit):
    job = submit(parallel={"tensor": 2, "data": 2}, elastic={"min_data": 1, "max_data": 4})

    def run(session):
        jobs.transition(session, job.id, JobState.STARTING)
        row = jobs.transition(session, job.id, JobState.RUNNING)
        row.generation, row.step, row.report_cursor = 1, 7, {"0": 4}

    store.write(run)
    agents = {rank: {"actor": f"a{rank}", "node": "n", "device": "cpu", "pid": 10 + rank} for rank in (0, 2)}
    gang = restored.NewerGang(4, 2, 1, 2, 1, 1, agents)
    assert store.write(lambda s: restored.take_over(s, job.id, gang)) is True
    with store.read() as session:
        row, life = jobs.get(session, job.id), generations.of_job(session, job.id)[-1]
        known = [(r.rank, r.generation, r.state, r.tensor, r.data, r.pid) for r in ranks.of_job(session, job.id)]
        last = events.page(session, job.id, limit=100).items[-1]
    assert (row.generation, row.report_cursor, row.tensor, row.pipeline, row.context, row.replicas) == (
        4,
        {},
        2,
        1,
        1,
        2,
    )
    assert (life.generation, life.cause, life.resume_step) == (4, "found running", 7)
    assert known == [(0, 4, "running", 0, 0, 10), (1, 4, "exited", 1, 0, None), (2, 4, "running", 0, 1, 12),
                     (3, 4, "exited", 1, 1, None)]  # fmt: skip
    assert (last.type, last.generation, last.data) == ("database_older", 4, {"known": 1, "running": 4})
    assert store.write(lambda s: restored.take_over(s, job.id, gang)) is False, "it is known by now"


@pytest.mark.parametrize(
    ("known", "becomes"),
    [
        ("QUEUED", "STARTING"), ("PAUSING", "STARTING"), ("PAUSED", "STARTING"), ("FAILED", "STARTING"),
        ("RESIZING", "RECOVERING"), ("RUNNING", "RUNNING"), ("SUCCEEDED", None), ("CANCELLED", None),
    ],
)  # fmt: skip
def test_restored_job_adopts_a_newer_gang_unless_it_succeeded_or_was_cancelled(store, submit, known, becomes):
    job = submit()

    def remember(session):
        row = jobs.get(session, job.id)
        row.state, row.generation = known, 1

    store.write(remember)
    gang = restored.NewerGang(2, 1, 1, 1, 1, 1, {})
    assert store.write(lambda s: restored.take_over(s, job.id, gang)) is (becomes is not None)
    assert store.query(jobs.get, job.id).state == (becomes or known)
