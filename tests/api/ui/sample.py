"""A service with sample jobs and the dashboard: `python tests/api/ui/sample.py HOME [--port PORT]` serves it.

The browser tests run it on a thread of theirs: another process would import all of it once more.
"""

import argparse
import json
import math
import random
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn

from manta.api.app import create_app
from manta.api.security.permissions import LINK_PATH
from manta.api.ui import mount
from manta.service.control.file_work import FileWork
from manta.service.control.options import ModelPackages
from manta.service.control.removal import Deletion, delete_checkpoint, delete_job
from manta.service.control.running_ranks import ObservedWaits, RankStack
from manta.service.identity import DEFAULT_PROJECT, Scope, digest_of, new_browser_token, new_key
from manta.service.job.inbox import JobRequest
from manta.service.logs.pages import LogsInHome, log_file, log_folder
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.recovery.waits import WaitingRank, Waits
from manta.service.states import JobState
from manta.service.store import (
    Store,
    checkpoints,
    events,
    generations,
    jobs,
    keys,
    metrics,
    projects,
    ranks,
    recoveries,
)
from manta.service.store.tables import Checkpoint
from manta.workers.checkpoint.catalog import checkpoint_path
from manta.workers.config import JobSpec
from manta.workers.data.roots import DataRoots
from manta.workers.paths import Paths

STEPS, DONE, CRASHED_AT = 400, 200, 120
MARKUP = "<img src=x onerror=alert(1)>"
"""What a rank prints, which no browser may take for anything else than text."""
SPEC: dict[str, Any] = {
    "name": "quickstart",
    "model": {"family": "gpt", "layers": 4, "hidden_size": 128, "heads": 4, "sequence_length": 128},
    "data": {"source": "python-stdlib"},
    "train": {"steps": STEPS, "global_batch_size": 16, "micro_batch_size": 2, "validate_every": 25},
    "parallel": {"tensor": 2, "pipeline": 2, "data": 2},
    "elastic": {"min_data": 1, "max_data": 2},
}


class SampleControl:
    """Stands for the control plane: cancels at once, and knows one node."""

    def __init__(self, store: Store, home: Path):
        self.store = store
        self.home = home
        self.data_roots, self.model_packages = DataRoots(), ModelPackages()
        self.logs = LogsInHome(home)
        self.draining = False

    def submitted(self, job_id: str) -> None:
        """Nothing to do."""

    def tell(self, job_id: str, request: JobRequest) -> None:
        """Nothing to do."""

    def delete(self, job_id: str) -> Deletion:
        """At once: there is nothing on a cluster."""
        return delete_job(self.store, Paths.of(self.home), job_id, lambda: None, FileWork())

    def delete_checkpoint(self, job_id: str, checkpoint_id: str, force: bool) -> Checkpoint:
        """As the service does."""
        return delete_checkpoint(self.store, Paths.of(self.home), job_id, checkpoint_id, force)

    def drain(self, node: str, seconds: float) -> dict[str, Any]:
        """Note it."""
        self.draining = True
        return self.cluster()["nodes"][0]

    def undrain(self, node: str) -> dict[str, Any]:
        """Note it."""
        self.draining = False
        return self.cluster()["nodes"][0]

    def check_cluster(self) -> dict[str, Any]:
        """All is well."""
        return {"problems": [], "nodes": 1, "tries": 4}

    def cluster(self) -> dict[str, Any]:
        """One node of 16 slots, half of them taken."""
        node = {
            "id": 14 * "a1b2",
            "address": "127.0.0.1",
            "alive": True,
            "accelerator": "slot",
            "total": 16,
            "free": 8,
            **dict.fromkeys(("slots_total", "slots_free"), 16),
        }
        return {"nodes": [{**node, "draining": self.draining}], "totals": {}}

    last_seen_cluster = cluster

    def waits(self, job_id: str) -> ObservedWaits:
        """All but one wait for it."""
        doing = "all-reduce of the tensor group"
        ranks = [WaitingRank(rank, "backward", doing, 0.02, (3,), 201) for rank in range(8) if rank != 3]
        ranks.insert(3, WaitingRank(3, "forward", "forward of micro-batch 2", 0.4, (), 201))
        return ObservedWaits(
            time.time(), Waits(tuple(ranks), (), "7 of 8 ranks wait, most of them in the end for rank 3")
        )

    def stack(self, job_id: str, rank: int) -> RankStack:
        """Somewhere in a forward."""
        return RankStack(rank, 4100 + 17 * rank, time.time(), 'File "layer.py", line 7 in forward')

    def problem_of_data(self, spec: JobSpec) -> str | None:
        """As the service does where it sees the data."""
        return self.data_roots.problem_of_data(spec)

    def ready(self) -> list[str]:
        """Ready."""
        return []


def row(step: int, now: float) -> dict[str, Any]:
    """Metrics of a step that look like those of a real job."""
    dice = random.Random(step)
    rate = 3900 + 250 * dice.random() - (2600 if step in (1, CRASHED_AT + 1) else 0)
    loss = 1.9 + 3.7 * math.exp(-step / 55) + 0.05 * dice.uniform(-1, 1)
    values = {"step": step, "time": now, "loss": loss, "tokens_per_second": rate, "step_seconds": 2048 / rate,
              "mfu_full": rate / 26000, "tokens": step * 2048}  # fmt: skip
    parts = {"forward_seconds": 0.3 / (rate / 2048), "backward_seconds": 0.6 / (rate / 2048)} if step % 10 == 0 else {}
    return values | parts | ({"validation_loss": loss + 0.06} if step % 25 == 0 else {})


def places(generation: int, state: str = "running") -> list[dict[str, Any]]:
    """Rows of 2 x 2 x 2 ranks."""
    return [
        {"rank": rank, "tensor": rank % 2, "pipeline": rank // 2 % 2, "data": rank // 4, "node": "n1", "device": "cpu",
         "pid": 4100 + 17 * rank, "generation": generation, "state": state}
        for rank in range(8)
    ]  # fmt: skip


def fill(store: Store, home: Path) -> tuple[str, dict[str, str]]:
    """Store a running job that was restarted once, and a few others; returns the running one's id, and theirs by
    name."""
    others = {}
    for name, ends in (("tiny-llama", ["STARTING", "RUNNING", "SUCCEEDED"]), ("bad-data", ["FAILED"])):
        other = others[name] = _create(store, name)
        for state in ends:
            why = ("data_missing", "/data/books: no such file or directory") if state == "FAILED" else (None, None)
            if state == "SUCCEEDED":
                store.write(lambda s, id=other: _commit(s, id, range(1, STEPS + 1)))
            store.write(lambda s, to=state, why=why, id=other: jobs.transition(s, id, JobState(to), *why))
    job_id = _create(store, "quickstart")
    store.write(lambda session: _run(session, job_id, home))
    waiting = others["wide"] = _create(store, "wide")
    missing = {"unit": "slots", "needed": 16, "available": 8, "free": 8}
    store.write(
        lambda s: jobs.set_waiting(s, waiting, missing, "insufficient_slots", "needs 16 slots; 8 of 16 are free")
    )
    _print_something(log_folder(home, job_id))
    return job_id, others


def _create(store: Store, name: str) -> str:
    spec = JobSpec.model_validate({**SPEC, "name": name})
    created = store.write(lambda session: jobs.create(session, spec))
    return created[0].id


def _run(session: Any, job_id: str, home: Path) -> None:
    now = time.time()
    jobs.transition(session, job_id, JobState.STARTING)
    jobs.get(session, job_id).started_at = now - 131
    first = generations.begin(session, job_id, "submitted", False)
    jobs.transition(session, job_id, JobState.RUNNING)
    metrics.record(session, job_id, first, 0, 1, [row(step, now) for step in range(1, CRASHED_AT + 1)])
    for step in (50, 100):
        _checkpoint(session, job_id, first, step, home)
    events.append(session, job_id, "rank_died", "rank 5 was killed by signal 9", generation=first, rank=5, step=120)
    jobs.transition(session, job_id, JobState.RECOVERING, "rank_died", "rank 5 was killed by signal 9")
    second = generations.begin(session, job_id, "rank_died", True, "snapshot", CRASHED_AT)
    message = f"resumed from the snapshots of step {CRASHED_AT}"
    events.append(session, job_id, "resumed", message, generation=second, step=CRASHED_AT)
    jobs.transition(session, job_id, JobState.RUNNING)
    metrics.record(session, job_id, second, 0, 1, [row(step, now) for step in range(CRASHED_AT + 1, DONE + 1)])
    _checkpoint(session, job_id, second, 150, home)
    ranks.replace(session, job_id, places(second))
    _backdate(session, job_id, now)


def _backdate(session: Any, job_id: str, now: float) -> None:
    """Let what was stored just now have happened over the last minutes."""
    for change, ago in zip(jobs.states_over_time(session, job_id), (140, 131, 127, 59, 55), strict=True):
        change.time = now - ago
    for event in events.page(session, job_id).items:  # those of states, in the order of their changes
        event.time = now - {"submitted": 140, "rank_died": 59.3, "resumed": 56}.get(event.type, 55)
    moves = [event for event in events.page(session, job_id).items if event.type == "state_changed"]
    for event, ago in zip(moves, (131, 127, 59, 55), strict=True):
        event.time = now - ago
    first, second = generations.of_job(session, job_id)
    first.started_at, first.trained_from, first.trained_until = now - 131, now - 127, now - 60
    first.ended_at = second.started_at = now - 58.4
    second.trained_from, second.trained_until = now - 56, now - 1
    times = RecoveryTimeline(now - 59.3, now - 59.6, now - 58.6, now - 58.3, now - 57, now - 56, now - 55)
    died = {"kind": "killed", "rank": 5, "cause": "rank 5 was killed by signal 9", "node": "n1"}
    recoveries.begin(session, job_id, second.generation, times, **died, source="snapshot", resume_step=CRASHED_AT)
    recoveries.record_replaced(session, job_id, second.generation, (5,), 7)


def _commit(session: Any, job_id: str, steps: Iterable[int]) -> None:
    generation = generations.begin(session, job_id, "submitted", False)
    metrics.record(session, job_id, generation, 0, 1, [row(step, time.time()) for step in steps])


def _checkpoint(session: Any, job_id: str, generation: int, step: int, home: Path) -> None:
    place = checkpoint_path(Paths.of(home).checkpoint_folder(job_id), step, generation)
    saved = checkpoints.begin(session, job_id, generation, step, str(place))
    assert saved is not None
    checkpoints.complete(session, saved.id, 9_860_000)


def _print_something(folder: Path) -> None:
    folder.mkdir(parents=True)
    for rank in range(8):
        with log_file(folder, rank).open("w") as file:
            for number in range(31):
                text = (
                    MARKUP
                    if number == 30
                    else f"step {number * 5 + 1}: micro-batches 4, loss {row(number * 5 + 1, 0)['loss']:.4f}"
                )
                entry = {"time": time.time() + number, "rank": rank, "generation": 1, "stream": "stdout", "text": text}
                file.write(json.dumps(entry) + "\n")


def one_time_link(store: Store, project: str | None = None, scope: Scope = Scope.ADMIN) -> str:
    """Path of a link for a new key: of the installation, or of a new project."""
    token = new_browser_token()

    def operation(session: Any) -> None:
        if project is not None:
            projects.create(session, project)
        key = keys.create(
            session, digest_of(new_key()), "viewer", scope, project or DEFAULT_PROJECT, installation=not project
        )
        keys.add_link(session, key.id, digest_of(token))

    store.write(operation)
    return f"{LINK_PATH}{token}"


class SampleServer:
    """Serves the sample, once `run` is called; requests from before that wait for it."""

    def __init__(self, home: Path, port: int = 0):
        """`port` 0: any."""
        self.store = Store(f"sqlite:///{home}/manta.db")
        self.store.migrate()
        job, others = fill(self.store, home)
        app = create_app(SampleControl(self.store, home), listens_on="127.0.0.1")
        mount(app)
        self._listener = socket.create_server(("127.0.0.1", port))
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.about = {
            "url": url,
            "job": job,
            "others": others,
            "link": f"{url}{one_time_link(self.store)}",
            "of_others": f"{url}{one_time_link(self.store, 'others')}",
            "of_reader": f"{url}{one_time_link(self.store, scope=Scope.READ)}",
        }
        """Where it is, the ids of its jobs, and links that sign in."""
        # Longer than a slow machine leaves connections idle: what is sent while one is closed is lost.
        config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=60, timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Until `stop`, or a signal to the main thread."""
        self._server.run([self._listener])
        self.store.close()

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--port", type=int, default=0)
    given = arguments.parse_args()
    served = SampleServer(given.home, given.port)
    print(json.dumps(served.about), flush=True)
    served.run()
