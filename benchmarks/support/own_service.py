"""A Manta service of the benchmark's own, in a temporary home, and what is asked of it again and again."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from manta.api.cli.service import start_service, stop_service
from manta.api.client import Client
from manta.api.schemas import Event, Job, Recovery
from manta.api.serving.local_service import running_service
from manta.service.cluster.processes import wait_until_ended
from manta.service.settings import Settings
from manta.service.states import is_final
from manta.workers.errors import MantaError
from manta.workers.paths import Paths
from manta.workers.snapshot.files import stored_steps

POLL_SECONDS = 0.02
UNHURRIED_SECONDS = 0.1
"""How often it is looked for what lasts: each look costs 6 ms of the cores that the job runs on."""
GONE_SECONDS = 10.0


class JobWentWrong(MantaError):
    """A job did not do what the benchmark waits for."""


class OwnService:
    """The service, its client and its folders."""

    def __init__(self, home: Path, allow_faults: bool = False, environment: Mapping[str, str] | None = None):
        """`environment`: of the service, and so of its ranks, besides this process's."""
        self.home, self.paths = home, Paths.of(home)
        self._allow_faults, self._environment = allow_faults, environment or {}
        self.start()

    def start(self) -> None:
        """Start it, also after its process was killed; it is ready when this returns."""
        with patch.dict(os.environ, self._environment):
            start_service(Settings(self.home, allow_faults=self._allow_faults), "127.0.0.1", 0, None, None)
        self.client = Client.of_home(self.home)

    def kill(self) -> None:
        """SIGKILL to the service's process, and to nothing else; returns when it is gone."""
        running = running_service(self.home)
        if running is None:
            raise JobWentWrong("there is no service to kill")
        process = psutil.Process(int(str(running["pid"])))
        process.kill()
        wait_until_ended([process], GONE_SECONDS)
        self.client.close()

    def wait_for_step(self, job_id: str, step: int, seconds: float) -> Job:
        """The job as first seen with `step` committed. Raises JobWentWrong."""
        deadline = time.monotonic() + seconds
        while (job := self.client.job(job_id)).step < step:
            if is_final(job.state) or time.monotonic() > deadline:
                raise JobWentWrong(f"{job.name} is {job.state} at step {job.step}, not at {step}: {job.message}")
            time.sleep(POLL_SECONDS)
        return job

    def wait_for_generation(self, job_id: str, generation: int, seconds: float) -> Job:
        """The job as first seen in `generation` or a later one. Raises JobWentWrong."""
        deadline = time.monotonic() + seconds
        while (job := self.client.job(job_id)).generation < generation:
            if is_final(job.state) or time.monotonic() > deadline:
                raise JobWentWrong(f"{job.name} is {job.state} in generation {job.generation}, not in {generation}")
            time.sleep(POLL_SECONDS)
        return job

    def wait_until_final(self, job_id: str, seconds: float) -> Job:
        """The job once it is final. Raises JobWentWrong."""
        deadline = time.monotonic() + seconds
        while not is_final((job := self.client.job(job_id)).state):
            if time.monotonic() > deadline:
                raise JobWentWrong(f"{job.name} is still {job.state} at step {job.step}")
            time.sleep(UNHURRIED_SECONDS)
        return job

    def succeed(self, job_id: str, seconds: float) -> Job:
        """The job once it has succeeded. Raises JobWentWrong."""
        job = self.wait_until_final(job_id, seconds)
        if job.state != "SUCCEEDED":
            raise JobWentWrong(f"{job.name} ended as {job.state}: {job.message}")
        return job

    def give_up(self, job_id: str, seconds: float) -> None:
        """Cancel the job unless it is over. Raises JobWentWrong when that takes too long."""
        if not is_final(self.client.job(job_id).state):
            self.client.cancel(job_id)
            self.wait_until_final(job_id, seconds)

    def events(self, job_id: str, *kinds: str) -> list[Event]:
        """The job's events of these types (none: all), oldest first."""
        events: list[Event] = []
        cursor: str | None = None
        while True:
            page = self.client.events(job_id, cursor, limit=1000)
            events += [event for event in page.items if not kinds or event.type in kinds]
            cursor = page.next_cursor
            if cursor is None:
                return events

    def resume_step(self, job_id: str, generation: int) -> int | None:
        """The committed step that a generation went on from."""
        steps = [event.step for event in self.events(job_id, "generation_started") if event.generation == generation]
        return steps[0] if steps else None

    def recoveries(self, job_id: str) -> list[Recovery]:
        """The records of the job's recoveries, oldest first."""
        return self.client.recoveries(job_id, limit=1000).items

    def processes(self, job_id: str) -> dict[int, tuple[int, float]]:
        """Process id and time of creation of each rank's trainer that runs."""
        processes = {}
        for row in self.client.ranks(job_id).items:
            with contextlib.suppress(psutil.Error):
                if row.pid is not None:
                    processes[row.rank] = (row.pid, psutil.Process(row.pid).create_time())
        return processes

    def committed(self, job_id: str, ranks: int) -> int:
        """The newest step that any rank has committed, out of shared memory; 0 before the first."""
        folder = self.paths.snapshot_folder(job_id)
        return max((step for rank in range(ranks) for step in stored_steps(folder, rank)), default=0)

    def rows(self, job_id: str) -> dict[int, tuple[Any, Any, Any]]:
        """Loss, gradient norm, and tokens trained on so far, by step."""
        metrics = self.client.metrics(job_id, ["loss", "grad_norm", "tokens"], max_points=10_000)
        series = [metrics.series[name] for name in ("loss", "grad_norm", "tokens")]
        return dict(zip(metrics.steps, zip(*series, strict=True), strict=True))


@contextlib.contextmanager
def own_service(allow_faults: bool = False, environment: Mapping[str, str] | None = None) -> Iterator[OwnService]:
    """Start a service that is up when this yields, and gone with all that it left afterwards. `environment`: see
    OwnService."""
    with tempfile.TemporaryDirectory(prefix="manta-benchmark-") as folder:
        home = Path(folder)
        try:
            service = OwnService(home, allow_faults, environment)
            yield service
            service.client.close()
        finally:
            stop_service(home)
