"""The processes of a simulated installation: its cluster, and the control planes that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.simulation.messages import Channel
from benchmarks.support.simulation.plane_process import READY
from manta.workers.errors import MantaError

SECONDS = 60.0
POLL_SECONDS = 0.05


class NotReady(MantaError):
    """A process did not come up; the message has the end of what it said."""


class ControlPlaneProcess:
    """One control plane, of many that use one home one after the other."""

    def __init__(self, home: Path, socket: Path, database: str | None = None):
        """`database`: its URL, where it is not in the home."""
        home.mkdir(exist_ok=True)
        self._log = home / "plane.log"
        words = [str(home), str(socket), *([] if database is None else [database])]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.support.simulation.plane_process", *words],
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """Until it has taken over what runs. Raises NotReady."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(SECONDS) or self.process.stdout.readline().strip() != READY.encode():
                self.kill()
                raise NotReady(f"no control plane: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


class ClusterProcess:
    """The simulated cluster."""

    def __init__(self, folder: Path, nodes: int, slots: int):
        """`nodes` with so many `slots` each; `folder`: for its socket."""
        self.socket = folder / "socket"
        command = [sys.executable, "-m", "benchmarks.support.simulation.cluster_process"]
        self.process = subprocess.Popen([*command, str(folder), str(nodes), str(slots)])
        deadline = time.monotonic() + SECONDS
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise NotReady("the simulated cluster did not come up")
            time.sleep(POLL_SECONDS)

    def account(self) -> dict[str, Any]:
        """See SimulatedCluster.account."""

        async def ask() -> Any:
            return await Channel(str(self.socket), {}).ask(None, "account", {})

        answers: dict[str, Any] = asyncio.run(ask())
        return answers


@contextlib.contextmanager
def simulated_installation(nodes: int, slots: int) -> Iterator[tuple[Path, ClusterProcess]]:
    """A home and a cluster; both are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="manta-simulation-"))
    home = folder / "home"
    home.mkdir()
    cluster = ClusterProcess(folder, nodes, slots)
    try:
        yield home, cluster
    finally:
        cluster.process.kill()
        cluster.process.wait()
        shutil.rmtree(folder, ignore_errors=True)
