"""From a step's commit to its metrics over REST."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.support.own_service import JobWentWrong, OwnService
from workers.snapshot.files import steps_kept

WATCH_SECONDS = 0.002
ASK_SECONDS = 0.01


def visibility_seconds(service: OwnService, document: dict[str, Any], seconds: float) -> list[float]:
    """Run a job: for each step, the seconds from its commit to the first answer that holds its metrics.

    The commit is taken from rank 0's marker in shared memory, which is set just before the step is reported, and is
    known to `WATCH_SECONDS`. Steps whose commit was not seen (the first, before its file is there) are left out.
    """
    job_id = service.client.submit(document).id
    commits: dict[int, float] = {}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(service, job_id, commits, stop), daemon=True)
    watcher.start()
    try:
        visible = _ask(service, job_id, document["train"]["steps"], time.monotonic() + seconds)
    finally:
        stop.set()
        watcher.join()
    service.wait_until_final(job_id, seconds)
    return [moment - commits[step] for step, moment in visible.items() if step in commits]


def _watch(service: OwnService, job_id: str, commits: dict[int, float], stop: threading.Event) -> None:
    folder = service.paths.snapshot_folder(job_id)
    while not stop.wait(WATCH_SECONDS):
        steps, now = steps_kept(folder, 0), time.monotonic()
        if steps and steps[-1] > 0:
            commits.setdefault(steps[-1], now)


def _ask(service: OwnService, job_id: str, steps: int, deadline: float) -> dict[int, float]:
    visible: dict[int, float] = {}
    last = 0
    while last < steps:
        answer, now = service.client.metrics(job_id, ["loss"], after_step=last), time.monotonic()
        for step in answer.steps:
            visible[step] = now
            last = step
        if not answer.steps and now > deadline:
            raise JobWentWrong(f"no metrics of step {last + 1} in time")
        time.sleep(ASK_SECONDS)
    return visible
