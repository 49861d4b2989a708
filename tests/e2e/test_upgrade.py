"""The last release's job, and this release on the same home and Ray: the job is taken over without a step lost, or it
is left running, and the last release continues it as if nothing had happened."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from manta.api.client import Client
from manta.service.cluster.ray_head import RayHead
from manta.service.revisions import newest_revision
from manta.workers.paths import Paths
from manta.workers.protocol.messages import PROTOCOL, SPOKEN
from manta.workers.snapshot.files import stored_steps

ROOT = Path(__file__).parents[2]
SECONDS, POLL_SECONDS = 90.0, 0.05
SLOW_SECONDS = 0.2
PACKAGES = ("src", "api", "service", "workers")
SKIP = "the last release is not here"
"""Beginning of the reason, for .ci/allowed-skips: a source archive has no history, a shallow clone not all of it."""


class Release:
    """One release's `manta`, run from a folder of its own with the packages that are installed."""

    def __init__(self, tree: Path, home: Path):
        self.tree, self.home = tree, home
        messages = (tree / "workers/protocol/messages.py").read_text(encoding="utf-8")
        self.protocol = int(re.search(r"^PROTOCOL = (\d+)$", messages, re.MULTILINE)[1])

    def manta(self, *words: str) -> tuple[int, str]:
        """Exit code of the command, and what it said, on one line."""
        environment = {**os.environ, "MANTA_HOME": str(self.home), "PYTHONPATH": str(self.tree / "src")}
        command = [sys.executable, "-P", "-m", "manta.api.cli", *words]
        done = subprocess.run(command, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=150)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def up(self) -> tuple[int, str]:
        return self.manta("up", "--port", "0", "--slots", "2", "--allow-faults")

    def kill(self) -> None:
        """SIGKILL to the service, and to nobody else."""
        process = psutil.Process(self._announced["pid"])
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    @property
    def client(self) -> Client:
        """Of this release, whichever the service is of."""
        return Client.of_home(self.home)

    @property
    def _announced(self) -> dict:
        return json.loads((self.home / "service.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def last_release(tmp_path_factory) -> Path:
    """The packages of the last release, from this repository's history."""
    version, commit = (ROOT / "releases.txt").read_text(encoding="utf-8").split("\n")[-2].split()
    git = shutil.which("git")
    archive = None
    if git is not None:
        archive = subprocess.run([git, "-C", str(ROOT), "archive", commit, *PACKAGES], capture_output=True, timeout=60)
    if archive is None or archive.returncode:
        pytest.skip(f"{SKIP}: git or its commit {commit[:7]} ({version}) is missing")
    tree = tmp_path_factory.mktemp("release")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True, timeout=60)
    return tree


@pytest.fixture
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("upgrade")
    yield home
    Release(ROOT, home).manta("down")
    assert RayHead(home).record() is None


def revision(home: Path) -> str:
    with closing(sqlite3.connect(home / "manta.db")) as database:
        return database.execute("SELECT version_num FROM alembic_version").fetchone()[0]


@pytest.mark.soak  # what is decided: tests/service/cluster/test_node_daemons.py, tests/service/test_takeover.py
def test_upgrade_loses_no_step_of_a_running_job(last_release, home, corpus):
    old, new = Release(last_release, home), Release(ROOT, home)
    code, said = old.up()
    assert code == 0, said
    job = old.client.submit(spec(corpus, 100_000)).id
    until_step(old.client, job, 3)
    old.client.inject(job, "slow", 0, seconds=SLOW_SECONDS)  # it leaves the cores to the services that come and go
    pids = pids_of(old.client, job)
    before = revision(home)
    old.kill()

    code, said = new.up()
    if old.protocol in SPOKEN:
        assert code == 0, said
        service = new
    else:
        assert code != 0
        assert f"cannot take over {job}: their agents speak protocol {old.protocol} and this release" in said
        assert f"of Manta {PROTOCOL}. Nothing was changed and they train on" in said
        assert "Start their release again and let them finish, or end their processes with `manta down`" in said
        assert "Traceback" not in said
        assert revision(home) == before
        memory = Paths.of(home).snapshot_folder(job)
        seen = max(stored_steps(memory, 0))
        until("steps without a service", lambda: max(stored_steps(memory, 0)) > seen)
        code, said = old.up()
        assert code == 0, said
        service = old

    step = service.client.job(job).step
    until_step(service.client, job, step + 3)
    upgraded = service.client.job(job)
    assert (upgraded.state, upgraded.generation, upgraded.restarts) == ("RUNNING", 1, 0)
    assert pids_of(service.client, job) == pids
    steps = service.client.metrics(job, ["loss"], max_points=10_000).steps
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.soak
def test_new_release_takes_over_an_idle_home_of_the_last_release(last_release, home, corpus):
    old, new = Release(last_release, home), Release(ROOT, home)
    code, said = old.up()
    assert code == 0, said
    job = old.client.submit(spec(corpus, 5)).id
    until("its end", lambda: old.client.job(job).state == "SUCCEEDED")
    was, steps = revision(home), old.client.metrics(job).steps
    old.kill()
    code, said = new.up()
    assert code == 0, said
    assert revision(home) == newest_revision()
    assert (home / f"manta.db.{was}").exists() or was == newest_revision()
    assert new.client.job(job).state == "SUCCEEDED" and new.client.metrics(job).steps == steps
    again = new.client.submit(spec(corpus, 5)).id  # on a daemon of this release: the other one's is replaced
    until("a job of this release", lambda: new.client.job(again).state == "SUCCEEDED")


@pytest.mark.soak
def test_job_stopped_under_the_last_release_resumes_from_its_checkpoint(last_release, home, corpus):
    old, new = Release(last_release, home), Release(ROOT, home)
    code, said = old.up()
    assert code == 0, said
    job = old.client.submit({**spec(corpus, 100_000), "checkpoint": {"every_steps": 20}}).id
    until("a checkpoint", lambda: any(each.state == "complete" for each in old.client.checkpoints(job).items))
    old.kill()
    code, said = new.manta("down")
    assert code == 0 and f"{job} (job) was stopped at step" in said
    code, said = new.up()
    assert code == 0, said
    until("the next generation", lambda: new.client.job(job).generation == 2)
    begun = [each for each in new.client.events(job, limit=1000).items if each.type == "generation_started"][-1]
    assert begun.data["resume_source"] == "checkpoint" and begun.step >= 20
    until_step(new.client, job, begun.step + 3)
    new.client.cancel(job)
    until("its end", lambda: new.client.job(job).state == "CANCELLED")


def spec(corpus: Path, steps: int) -> dict:
    """A tiny job of two ranks."""
    return {
        "model": {"layers": 4, "hidden_size": 64, "heads": 4, "sequence_length": 128},
        "data": {"source": "text", "paths": [str(corpus)]},
        "train": {"steps": steps, "global_batch_size": 8, "micro_batch_size": 4},
        "parallel": {"tensor": 2},
        "checkpoint": {"every_steps": 0, "snapshot_every_steps": 1},
    }


def until(what, condition):
    """Ask `condition` until it holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {SECONDS:g} s"
        time.sleep(POLL_SECONDS)


def pids_of(client, job):
    return [rank.pid for rank in client.ranks(job).items]


def until_step(client, job, step):
    until(f"step {step}", lambda: client.job(job).step >= step)
