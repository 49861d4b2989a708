"""A service that others than `manta up` started: in containers, on machines of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from manta.api.client import Client
from tests.e2e.containers import Containers
from tests.e2e.manta import OFTEN_SECONDS, SECONDS, Manta


class Installation(Manta):
    """Containers with a service, as its users reach it."""

    def __init__(self, engine: Containers, corpus: str, url: str, key: str):
        """`corpus`: its path where ranks run."""
        self.engine, self._corpus, self.client = engine, Path(corpus), Client(url, key=key)

    def worker_of(self, job: str) -> str:
        """A worker on which ranks of the job run: containers have their names as host names."""
        return str(self.client.ranks(job).items[0].node)

    def zygotes(self, *workers: str) -> list[psutil.Process]:
        """Those of all workers, or of `workers`, that there are."""
        found = []
        for process in self.engine.processes(*workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "manta.workers.zygote" in process.cmdline():
                    found.append(process)
        return found

    def trains_on_without_its_worker(self, job: str, saved_every: int, steps: int) -> None:
        """Kill a worker of a job once it has saved something, start it again, and see the job end with every step."""
        self.until_step(job, 1, OFTEN_SECONDS)  # the job is short
        lost = self.worker_of(job)
        self.until_step(job, saved_every, OFTEN_SECONDS)
        self.engine.kill(lost)
        self.until("the recovery", lambda: self.events(job, "recovered"), 3 * SECONDS)
        self.engine.start(lost)
        self.until_state(job, "SUCCEEDED", seconds=3 * SECONDS)
        assert [step for step, _, _ in self.curve(job)] == list(range(1, steps + 1))
        self.until_healthy(lost)

    def until_healthy(self, name: str) -> None:
        """Return when a container's health check succeeds."""
        self.until(f"{name} being healthy", lambda: self.engine.is_done(name), 3 * SECONDS)


def check_rights(engine: Containers) -> None:
    """Each container that runs has the user of its record, no capability, no way to more, and nothing to write in what
    its image brought."""
    for name in engine.names():
        status = dict(line.split(":", 1) for line in engine.run(name, "cat", "/proc/1/status").stdout.splitlines())
        assert status["Uid"].split() == [str(engine.record(name).user)] * 4, name
        assert {int(status[each], 16) for each in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {0}, name
        assert status["NoNewPrivs"].strip() == "1", name
        for folder in ("/", "/usr", "/etc", "/opt"):
            assert "Read-only" in engine.run(name, "touch", f"{folder}/file").stderr, (name, folder)


def reaches(engine: Containers, name: str, other: str, port: int) -> bool:
    """Whether a container gets a connection to a port of another one."""
    connect = f"</dev/tcp/{engine.address(other)}/{port}"
    return engine.run(name, "timeout", "2", "bash", "-c", connect).returncode == 0
