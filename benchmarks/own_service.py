"""A Manta service of the benchmark's own, in a temporary home, and what is asked of it again and again."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api.cli_service import start_service, stop_service
from api.client import MantaClient
from api.schemas import Job
from service.states import is_final
from workers.checkpoint.snapshot import steps_kept
from workers.errors import MantaError
from workers.paths import Paths

POLL_SECONDS = 0.02


class JobWentWrong(MantaError):
    """A job did not do what the benchmark waits for."""


class OwnService:
    """The service's client and its folders."""

    def __init__(self, home: Path, client: MantaClient):
        self.client, self.paths = client, Paths.of(home)

    def wait_for_step(self, job_id: str, step: int, seconds: float) -> Job:
        """The job as first seen with `step` committed. Raises JobWentWrong."""
        deadline = time.monotonic() + seconds
        while (job := self.client.job(job_id)).step < step:
            if is_final(job.state) or time.monotonic() > deadline:
                raise JobWentWrong(f"{job.name} is {job.state} at step {job.step}, not at {step}: {job.message}")
            time.sleep(POLL_SECONDS)
        return job

    def wait_until_final(self, job_id: str, seconds: float) -> Job:
        """The job once it is final. Raises JobWentWrong."""
        deadline = time.monotonic() + seconds
        while not is_final((job := self.client.job(job_id)).state):
            if time.monotonic() > deadline:
                raise JobWentWrong(f"{job.name} is still {job.state} at step {job.step}")
            time.sleep(POLL_SECONDS)
        return job

    def committed(self, job_id: str, ranks: int) -> int:
        """The newest step that any rank has committed, out of shared memory; 0 before the first."""
        folder = self.paths.snapshot_folder(job_id)
        return max((step for rank in range(ranks) for step in steps_kept(folder, rank)), default=0)

    def curve(self, job_id: str) -> dict[int, Any]:
        """Loss by step."""
        found = self.client.metrics(job_id, ["loss"], max_points=10_000)
        return dict(zip(found.steps, found.series["loss"], strict=True))


@contextlib.contextmanager
def own_service() -> Iterator[OwnService]:
    """Start a service that is up when this yields, and gone with all that it left afterwards."""
    with tempfile.TemporaryDirectory(prefix="manta-benchmark-") as folder:
        home = Path(folder)
        try:
            url = start_service(home, "127.0.0.1", 0, None, None)
            with MantaClient(url) as client:
                yield OwnService(home, client)
        finally:
            stop_service(home)
