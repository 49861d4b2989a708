"""A real HTTP server on a free port, in front of a control plane that only remembers what it was asked."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import typer.testing
import uvicorn

from manta.api.app import create_app
from manta.api.app_state import state_of
from manta.api.security import auditing
from manta.api.serving.connections import MAX_CONNECTIONS, HttpServer, limited_to
from manta.service.cluster.errors import NodeNotFound
from manta.service.control.cluster_view import Measurements
from manta.service.control.exports import Exports
from manta.service.control.faults import FaultsNotAllowed, refuse_impossible
from manta.service.control.file_work import FileWork
from manta.service.control.options import ModelPackages
from manta.service.control.removal import Deletion, delete_checkpoint, delete_job
from manta.service.control.running_ranks import ObservedWaits, RankNotFound, RankStack
from manta.service.job.inbox import JobRequest
from manta.service.logs.pages import LogsInHome
from manta.service.recovery.waits import WaitingRank, Waits
from manta.service.settings import RequestLimits
from manta.service.states import JobState
from manta.service.store import Checkpoint, Store, generations, jobs, metrics
from manta.workers.config import JobSpec
from manta.workers.data.roots import DataRoots
from manta.workers.paths import Paths
from manta.workers.protocol.messages import Fault
from manta.workers.protocol.requests import Arm, RankRequest
from tests.api.support.described_api import description_at
from tests.api.support.keys import ADMIN, add_admin, bearer

DOCUMENT: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 10, "global_batch_size": 4},
    "parallel": {"tensor": 2, "pipeline": 2, "data": 1},
}


UNLIMITED = RequestLimits(0, 10_000, 10_000, 0)


class NotedExports(Exports):
    """Notes what shall be exported, and no more."""

    def begin(self, job_id, checkpoint_id, to, format, dtype):
        target = self._target(to)
        return self._store.write(lambda s: self._start(s, job_id, checkpoint_id, target, format, dtype))[0]


@dataclass
class FakeControl:
    """Stands for the control plane."""

    store: Store | None = None
    home: Path = Path()
    asked: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    allow_faults: bool = False
    closed_ports: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    data_roots: DataRoots = field(default_factory=DataRoots)
    model_packages: ModelPackages = field(default_factory=ModelPackages)
    changed_database: Callable[[], None] | None = None
    measured: Measurements = field(default_factory=lambda: Measurements(0.0, 0, {}))

    def begin(self, store: Store, home: Path) -> None:
        """Forget the test before this one."""
        changed_database = self.changed_database
        self.__init__(store, home, changed_database=changed_database)
        changed_database()

    @property
    def logs(self) -> LogsInHome:
        return LogsInHome(self.home)

    def submitted(self, job_id: str) -> None:
        self.asked.append(("submitted", job_id))

    def tell(self, job_id: str, request: JobRequest | RankRequest) -> None:
        if not isinstance(request, Arm):
            self.asked.append((type(request).__name__.lower(), job_id))
            return
        if not self.allow_faults:
            raise FaultsNotAllowed()
        refuse_impossible(request.fault, ranks=4, step=2, steps=10)
        self.faults.append(request.fault)

    def delete_checkpoint(self, job_id: str, checkpoint_id: str, force: bool) -> Checkpoint:
        return delete_checkpoint(self.store, Paths.of(self.home), job_id, checkpoint_id, force)

    @property
    def exports(self) -> Exports:
        return NotedExports(self.store, (self.home / "exports",), FileWork())

    def delete(self, job_id: str) -> Deletion:
        return delete_job(
            self.store, Paths.of(self.home), job_id, lambda: self.asked.append(("release_job", job_id)), FileWork()
        )

    def waits(self, job_id: str) -> ObservedWaits:
        self.store.query(jobs.get, job_id)
        ranks = (
            WaitingRank(0, "forward", "forward of micro-batch 3", 2.5, (), 7),
            WaitingRank(1, "backward", "backward, waiting for rank 0 to send a message", 2.0, (0,), 7),
        )
        return ObservedWaits(100.0, Waits(ranks, (0,), "the job is stuck because of rank 0: it waits for nobody"))

    def stack(self, job_id: str, rank: int) -> RankStack:
        if rank > 1:
            raise RankNotFound(job_id, rank, 2)
        return RankStack(rank, 4711, 100.0, "Current thread (most recent call first)")

    def drain(self, node: str, seconds: float) -> dict[str, Any]:
        if not "abcd1234".startswith(node):
            raise NodeNotFound(node, 0)
        self.asked.append((f"drain within {seconds:g} s", node))
        return {**self.cluster()["nodes"][0], "id": "abcd1234", "draining": True}

    def undrain(self, node: str) -> dict[str, Any]:
        return {**self.cluster()["nodes"][0], "id": "abcd1234", "draining": False}

    def cluster(self) -> dict[str, Any]:
        node = {
            "id": "n1",
            "address": "127.0.0.1",
            "alive": True,
            "accelerator": "slot",
            "total": 16,
            "free": 15,
            **dict.fromkeys(("slots_total", "slots_free"), 16),
        }
        return {"nodes": [{**node, "ranks": [{"job": "job_000000000001", "rank": 0}]}], "totals": {"total": 16}}

    def last_seen_cluster(self) -> dict[str, Any]:
        return self.cluster()

    def check_cluster(self) -> dict[str, Any]:
        self.asked.append(("check", "cluster"))
        return {"problems": self.closed_ports, "warnings": self.left_out, "nodes": 2, "tries": 10}

    def problem_of_data(self, spec: JobSpec) -> str | None:
        is_here = spec.data.source == "python-stdlib"  # to look at all of its files takes longer than most tests
        return None if is_here else self.data_roots.problem_of_data(spec)

    def ready(self) -> list[str]:
        return self.reasons

    def measurements(self) -> Measurements:
        return self.measured


@dataclass
class Service:
    """A running server, and what tests do behind its back."""

    url: str
    control: FakeControl
    http: httpx.Client

    @property
    def store(self) -> Store:
        return self.control.store

    def submit(self, **changes: Any) -> dict[str, Any]:
        response = self.http.post("/v1/jobs", json={**DOCUMENT, **changes})
        assert response.status_code == 201, response.text
        return response.json()

    def move(self, job_id: str, *states: str) -> None:
        for state in states:
            self.store.write(lambda session, to=state: jobs.transition(session, job_id, JobState(to)))

    def report(self, job_id: str, rows: list[dict[str, Any]]) -> None:
        def operation(session):
            generation = generations.begin(session, job_id, "test", False)
            metrics.record(session, job_id, generation, 0, 1, rows)

        self.store.write(operation)


@pytest.fixture(scope="session", autouse=True)
def commands_are_read_once() -> Iterator[None]:
    """By Typer's runner, which otherwise reads the signatures of all commands each time that one is run: it takes
    longer than the command."""
    known: dict[tuple[Any, ...], tuple[typer.Typer, Any]] = {}

    def command_of(app: typer.Typer) -> Any:
        """Read again when the app has got further commands; an app that is known stays, so that no other has its id."""
        commands = frozenset(each.name or each.callback for each in app.registered_commands)
        key = id(app), commands, frozenset(each.name for each in app.registered_groups)
        if key not in known:
            known[key] = app, typer.main.get_command(app)
        return known[key][1]

    with mock.patch.object(typer.testing, "_get_command", command_of):
        yield


@pytest.fixture(autouse=True)
def key_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clients and commands send."""
    monkeypatch.setenv("MANTA_API_KEY", ADMIN)


@pytest.fixture(scope="session", autouse=True)
def audit_is_waited_for() -> Iterator[None]:
    """An answer comes when its line of the audit is stored, however slow the disk is: many tests read it then."""
    with mock.patch.object(auditing, "WRITE_SECONDS", 60.0):
        yield


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(DOCUMENT)


def client_of(url: str) -> httpx.Client:
    """A client that holds every answer against the description of the API."""
    hooks = {"response": [description_at(url).check]}
    return httpx.Client(base_url=url, timeout=20, event_hooks=hooks, headers=bearer(ADMIN), verify=False)  # it is HTTP


@contextlib.contextmanager
def serving(control: FakeControl, limits: RequestLimits = UNLIMITED, most: int = MAX_CONNECTIONS) -> Iterator[str]:
    """A server in front of `control` that holds `most` connections; its address."""
    ready = threading.Event()

    class Server(HttpServer):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.set()

    app = create_app(control, limits=limits)
    control.changed_database = state_of(app).identities.forget
    # Longer than clients keep idle connections: what is sent while one is closed is lost.
    patience = {"timeout_keep_alive": 60, "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(app, http=limited_to(most), port=0, log_level="warning", **patience)
    server = Server(config, app)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(20)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[tuple[str, FakeControl]]:
    """A server that most tests share, and the control plane behind it, whose store is another for every test."""
    control = FakeControl()
    with serving(control) as url:
        yield url, control


@pytest.fixture
def service(tmp_path: Path, store: Store, shared_server: tuple[str, FakeControl]) -> Iterator[Service]:
    """A server with an empty database."""
    url, control = shared_server
    add_admin(store)
    control.begin(store, tmp_path)
    with client_of(url) as http:
        yield Service(url, control, http)


@pytest.fixture
def job(service) -> dict[str, Any]:
    """A job that was just submitted, as it was answered."""
    return service.submit()


@pytest.fixture
def own_service(tmp_path: Path, store: Store) -> Iterator[Service]:
    """The same with a server of its own, whose counters begin at zero."""
    add_admin(store)
    control = FakeControl(store, tmp_path)
    with serving(control) as url, client_of(url) as http:
        yield Service(url, control, http)
