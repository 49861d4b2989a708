"""A job database that does not answer for a while costs a job nothing, whatever happens to its ranks meanwhile."""

import contextlib
import sqlite3

from manta.workers.snapshot.files import stored_steps
from tests.e2e.manta import EVERY_STEP, LASTING, PAIR


@contextlib.contextmanager
def locked(home):
    """Another process holds the database as SQLite's writer."""
    other = sqlite3.connect(home / "manta.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def newest_step(manta, job):
    return max(stored_steps(manta.paths.snapshot_folder(job), 0), default=0)


def complaints(manta):
    """How often the service has said that its database does not answer."""
    return (manta.home / "logs" / "service.log").read_text().count("the database does not answer")


@LASTING
def test_database_that_is_locked_while_a_rank_dies(manta, pair_undisturbed, kill, seconds):
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint=EVERY_STEP), 1)
    pids, before, said = manta.pids(job), newest_step(manta, job), complaints(manta)
    with locked(manta.home):
        manta.until("steps without a database", lambda: newest_step(manta, job) >= before + 2)
        kill(pids[1])
        manta.until("an error of the database", lambda: complaints(manta) > said)
        manta.endure(seconds)
        assert manta.client.job(job).state == "RUNNING", "what can be read is answered"
    ended = manta.succeeded(job, pair_undisturbed)
    assert (ended.restarts, ended.generation) == (1, 2)
    assert len(manta.events(job, "ranks_replaced")[0].data["kept"]) == len(pids) - 1
    assert manta.leftovers(job) == []
