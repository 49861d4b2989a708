"""Bad days of the machine that the control plane runs on: its clock is set, its disk is full, its home is read-only.
No job notices."""

import contextlib
import os
import sqlite3
import struct

import psutil
import pytest

from manta.api.cli.service import stop_service
from manta.service.own_files import HomeUnusable
from manta.workers.snapshot.files import stored_steps
from tests.e2e.manta import EVERY_STEP, PAIR, SECONDS, STEPS, Manta
from tests.e2e.small_file_system import read_only, skip_unless_mounted

HOUR = 3600.0
# Python runs it before anything else in each process of the service, its nodes and its ranks. Their waiting does not go
# by this clock but by the monotonic one, as it does where a real clock is set.
SHIFTED = """
import mmap, struct, time

_time = time.time
with open({file!r}) as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)


def _shifted():
    return _time() + struct.unpack("d", _ahead)[0]


time.time = _shifted
"""


class Clock:
    """What the processes of a service take for the time."""

    def __init__(self, folder):
        self.folder, self._file = folder, folder / "ahead"
        self._file.write_bytes(bytes(8))
        (folder / "sitecustomize.py").write_text(SHIFTED.format(file=str(self._file)))

    def set(self, ahead):
        """So many seconds ahead of the real one."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("d", ahead))


@pytest.fixture
def clock(tmp_path):
    return Clock(tmp_path)


@pytest.fixture
def service(clock, tmp_path, corpus):
    """One that goes by `clock`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(clock.folder), prepend=os.pathsep)
        running = Manta(tmp_path / "home", corpus, slots=2)
        yield running
        stop_service(running.home)


@contextlib.contextmanager
def full(folder):
    """Nothing is left of the disk meanwhile."""
    file = folder / "filler"
    try:
        with file.open("wb", buffering=0) as taken, contextlib.suppress(OSError):
            while True:
                taken.write(bytes(4096))
        yield
    finally:
        file.unlink()


@pytest.mark.soak
def test_clock_change_costs_a_running_job_nothing(service, clock, pair_undisturbed, kill):
    job = service.submit_held(service.spec(layout=PAIR), 0)  # the other one is killed
    processes = service.agents(), service.zygote()
    kept = service.pids(job)[0]
    for times, ahead in enumerate((HOUR, 0.0), start=1):
        clock.set(ahead)
        victim = service.pids(job)[1]
        if ahead == 0.0:  # a control plane that comes meets processes that are newer than now
            service.kill_service()
            service.start()
        kill(victim)
        service.until_generation(job, times + 1)
        assert service.pids(job)[0] == kept
        service.until("the recovery", lambda wanted=times: len(service.events(job, "recovered")) == wanted)
    assert (service.agents(), service.zygote()) == processes, "those of before are known again"
    kill(service.pids(job)[1])
    service.until_generation(job, 4)
    service.release_job(job, 0)
    ended = service.until_state(job, "SUCCEEDED")
    assert service.curve(job) == pair_undisturbed
    assert (ended.restarts, ended.generation) == (3, 4)
    first, second, _ = service.events(job, "recovered")
    assert first.time > second.time, "the clock was set back"
    ledger = service.client.ledger(job)
    assert all(seconds >= 0.0 for seconds in ledger.seconds.values())
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, abs=0.01)
    assert service.leftovers(job) == []


def without_free_pages(file):
    """What earlier tests have deleted from the database leaves no room in it."""
    with contextlib.closing(sqlite3.connect(file, timeout=SECONDS, isolation_level=None)) as database:
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.soak  # its parts: tests/e2e/test_database_away.py, test_full.py
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_full_disk_under_the_database_while_a_rank_dies(manta, disk, pair_undisturbed, kill, seconds):
    skip_unless_mounted(disk)

    def unwritten_steps():
        newest = max(stored_steps(manta.paths.snapshot_folder(job), 0), default=0)
        return newest - manta.client.job(job).step

    job = manta.submit_held(manta.spec(layout=PAIR, checkpoint=EVERY_STEP), 1)
    kept, victim = manta.pids(job)
    without_free_pages(manta.home / "manta.db")
    with full(disk):
        manta.until("steps that cannot be written down", lambda: unwritten_steps() >= 3)
        kill(victim)
        manta.until("the end of its process", lambda: not psutil.pid_exists(victim))
        manta.endure(seconds)
        assert manta.client.job(job).state == "RUNNING", "what can be read is answered"
    manta.until_generation(job, 2)
    assert manta.pids(job)[0] == kept
    ended = manta.succeeded(job, pair_undisturbed)
    assert (ended.restarts, ended.generation) == (1, 2)
    assert manta.leftovers(job) == []


@pytest.mark.soak  # its parts: tests/e2e/test_full.py, test_database_away.py
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_home_that_becomes_read_only_while_a_rank_and_the_service_die(manta, disk, kill, seconds):
    skip_unless_mounted(disk)
    document = manta.spec(STEPS + int(3 * seconds), PAIR, checkpoint={"every_steps": 2, "snapshot_every_steps": 1})
    undisturbed = manta.submit(document)
    manta.until_state(undisturbed, "SUCCEEDED")
    job = manta.submit_held(document, 0, 5)
    kept, victim = manta.pids(job)
    with read_only(manta.home):
        kill(victim)
        manta.until_generation(job, 2)
        manta.until("a checkpoint that cannot be written", lambda: manta.events(job, "checkpoint_failed"))
        manta.kill_service()
        with pytest.raises(HomeUnusable, match="Read-only file system"):
            manta.start()
        manta.endure(seconds)
    manta.start()
    assert manta.pids(job)[0] == kept
    kill(manta.pids(job)[1])
    manta.until_generation(job, 3)
    manta.release_job(job, 0)
    ended = manta.until_state(job, "SUCCEEDED")
    assert manta.curve(job) == manta.curve(undisturbed)
    assert (ended.restarts, ended.generation) == (2, 3)
    assert manta.client.checkpoints(job).items[0].step == ended.step
    assert manta.leftovers(job) == []
