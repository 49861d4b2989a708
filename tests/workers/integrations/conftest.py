"""A Ray Train run as its user starts one: the example, in a process with a Ray of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 240.0
POLL_SECONDS = 0.05


@dataclass
class Run:
    """A run that may be under way."""

    storage: Path
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.storage / self.name

    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Look until `condition` holds, and return what it said."""
        deadline = time.monotonic() + SECONDS
        while not (answer := condition()):
            assert self.process.poll() is None, f"it ended before {what}: {self.printed()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.printed()[-3000:]}"
            time.sleep(POLL_SECONDS)
        return answer

    def workers(self) -> list[psutil.Process]:
        """The processes of its workers."""
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RayTrainWorker" in " ".join(process.cmdline()):
                    processes.append(process)
        return processes

    def ended(self, seconds: float = SECONDS) -> str:
        """Wait for its end, which is a good one; what it has printed."""
        assert self.process.wait(seconds) == 0, self.printed()[-3000:]
        return self.printed()


@pytest.fixture(autouse=True)
def outside_of_ray() -> None:
    """Not here: modules that have met Ray must keep it."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """Starts an example with these arguments: its run. What it leaves running ends with the tests."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:  # paths of sockets are short

        def start(storage: Path, name: str, program: Path, *arguments: Any) -> Run:
            folder = tmp_path_factory.mktemp("ray-train")
            log = folder / "log"
            environment = {**os.environ, "RAY_TMPDIR": sockets, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
            command = [sys.executable, program, *arguments, "--storage", storage, "--name", name]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(word) for word in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output,
                )  # fmt: skip
            runs.append(Run(storage, name, process, log))
            return runs[-1]

        yield start
        for run in runs:
            _end(run.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        for member in (psutil.Process(process.pid), *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, SECONDS)
    process.wait()
