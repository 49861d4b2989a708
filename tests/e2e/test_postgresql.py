"""A service whose jobs are in PostgreSQL: its server goes for a while, and its database becomes one of earlier."""

import time
from contextlib import closing

import psutil
import pytest

from manta.api.client import ApiError
from manta.service.store import Store
from manta.service.store.backup_file import restore
from manta.workers.snapshot.files import stored_steps
from tests.e2e.manta import EVERY_STEP, PAIR
from tests.e2e.test_restored_database import check_that_a_newer_job_never_notices


def newest_step(manta, job):
    return max(stored_steps(manta.paths.snapshot_folder(job), 0), default=0)


@pytest.mark.soak  # a database that is locked: test_database_away.py
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_server_that_is_away_while_a_rank_dies(on_postgres, postgres, kill, seconds):
    manta = on_postgres
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint=EVERY_STEP), 1)
    pids, before = manta.pids(job), newest_step(manta, job)
    assert not any("PGPASSWORD" in names or "MANTA_DATABASE_URL" in names for names in environments(manta))
    postgres.stop()
    try:
        kill(pids[1])
        with pytest.raises(ApiError) as caught:
            manta.client.cancel(job)
        assert (caught.value.problem.status, caught.value.problem.code) == (503, "database_unavailable")
        log = manta.home / "logs" / "service.log"
        manta.until("an error of the database", lambda: "the database does not answer" in log.read_text())
        manta.endure(seconds)
    finally:
        postgres.start()
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.restarts, ended.generation, ended.step) == (1, 2, 60)
    assert [step for step, _, _ in manta.curve(job)] == list(range(1, 61))
    assert newest_step(manta, job) == 0 < before
    assert len(manta.events(job, "ranks_replaced")[0].data["kept"]) == 1
    assert manta.leftovers(job) == []


def environments(manta):
    """Of the processes of a job that runs."""
    return [psutil.Process(process.pid).environ() for process in [manta.zygote(), *manta.agents()]]


@pytest.mark.soak  # as a file: test_restored_database.py
def test_job_that_is_newer_than_its_restored_database_never_notices(on_postgres, kill, tmp_path):
    def restored(backup):
        on_postgres.until("no connection", lambda: not connections(on_postgres))
        return restore(on_postgres.database, backup, replace=True, now=time.time())

    check_that_a_newer_job_never_notices(on_postgres, on_postgres.database, restored, kill, tmp_path / "backup.db")


def connections(manta):
    with closing(Store(manta.database)) as store, store.read() as session:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        return session.connection().exec_driver_sql(query).scalar_one()
