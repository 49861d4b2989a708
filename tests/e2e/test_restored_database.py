"""A job database becomes one of earlier, of a backup, while jobs run on."""

import time
from contextlib import closing

from manta.service.store import Store
from manta.service.store.backup_file import back_up, restore
from manta.service.store.location import url_in
from tests.e2e.manta import EVERY_STEP, LONG_HOLD_SECONDS, PAIR


def test_job_that_is_newer_than_its_restored_database_never_notices(manta, kill, tmp_path):
    url = url_in(manta.home, None)

    def restored(backup):
        return restore(url, backup, replace=True, now=time.time())

    check_that_a_newer_job_never_notices(manta, url, restored, kill, tmp_path / "backup.db")


def check_that_a_newer_job_never_notices(manta, url, restored, kill, backup):
    """A job goes on to its next generation after the database at `url` was backed up; `restored` puts the backup in its
    place, and says how many jobs of it are not over."""
    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint=EVERY_STEP), 0, seconds=LONG_HOLD_SECONDS)
    with closing(Store(url)) as store:
        back_up(store, backup)
    kill(manta.pids(job)[1])
    manta.until_generation(job, 2)
    manta.until("a step of generation 2", lambda: manta.events(job, "recovered"))
    pids = manta.pids(job)
    manta.kill_service()
    assert restored(backup) == 1
    manta.start()
    manta.until("the take-over", lambda: manta.events(job, "database_older"))
    assert manta.pids(job) == pids
    assert manta.client.job(job).generation == 2
    step = manta.client.job(job).step
    manta.until("another step", lambda: manta.client.job(job).step > step)
    kill(pids[0])  # the one that is held up
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.generation, ended.step) == (3, 60)
    assert manta.leftovers(job) == []
