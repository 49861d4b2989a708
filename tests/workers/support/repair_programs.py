"""What a rank does in the tests of in-place repair: train, and go on in the next generation whenever a peer is lost."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import HOST, SECRET
from reported import rows_of

from manta.workers.comm.backend import Backend
from manta.workers.comm.comm import Comm
from manta.workers.comm.links_backend import LinksBackend
from manta.workers.errors import PeerLost
from manta.workers.protocol.messages import Resume
from manta.workers.protocol.reports import Message
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter


@dataclass(frozen=True)
class Cut:
    """In the job's `generation`-th generation, from 0, `rank` loses its connections when it waits for its `message`-th
    message."""

    generation: int
    rank: int
    message: int


@dataclass
class Lived:
    """What a rank lived through."""

    generations: int = 0
    messages: int = 0
    """That it waited for in its last generation."""
    steps_redone: int = 0
    state: str = ""
    """Hash of the state at the end, and of the parameters."""
    rows: dict[int, tuple[float, float]] | None = None
    """By step: loss and gradient norm."""


def train_through(comm: Comm, document: dict[str, Any], folder: str, port: int, cuts: list[Cut]) -> Lived:
    """Train to the end of the job through all `cuts`."""
    lived, rows, first = Lived(), {}, comm.generation

    def take(messages: list[Message]) -> None:
        for row in rows_of(messages):
            rows[row["step"]] = (row["loss"], row["grad_norm"])

    reporter = Reporter(take)
    store = dist.TCPStore(HOST, port, is_master=False)
    agent = PeersToTell(comm, port)
    trainer = Trainer(parse_job_spec(document), comm, reporter, 1e12, StatePaths("test", snapshots=folder))
    resume = Resume()
    while True:
        _cut(comm, lived, [cut for cut in cuts if (cut.generation, cut.rank) == (lived.generations, comm.rank)])
        lived.generations += 1
        try:
            trainer.restore(resume)
            trainer.train()
            break
        except PeerLost:
            agent.tell()
            comm.close()
            trainer.rest()
        resume = _agreed(trainer, store, f"repair-{first}-{lived.generations}")
        lived.steps_redone += trainer.step - resume.step
        comm.connect(store, first * 1000 + lived.generations, HOST, SECRET)
    agent.end()
    reporter.close()
    state = hashlib.sha256()
    for tensor in (*trainer.engine.state(), trainer.engine.flat.parameters):
        state.update(tensor.detach().view(torch.uint8).numpy().tobytes())  # of any type
    lived.state, lived.rows = state.hexdigest(), rows
    trainer.close()
    return lived


class PeersToTell:
    """Tells this rank that a peer has left, as an agent does: over gloo it may not notice."""

    def __init__(self, comm: Comm, port: int):
        self._comm, self._ended = comm, threading.Event()
        self._store = dist.TCPStore(HOST, port, is_master=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended.wait(0.02):
            generation = self._comm.generation
            if self._store.check([f"left-{generation}"]):
                self._comm.end(generation)

    def tell(self) -> None:
        """That this rank leaves its generation."""
        self._comm.end(self._comm.generation)
        dist.TCPStore(HOST, self._store.port, is_master=False).set(f"left-{self._comm.generation}", "")

    def end(self) -> None:
        """Nobody is told anything any more."""
        self._ended.set()
        self._thread.join()


def _agreed(trainer: Trainer, store: dist.Store, key: str) -> Resume:
    """The newest step that all ranks can go on from, as the supervisor would choose it."""
    assert trainer.state.snapshots is not None
    mine = {*committed_steps(trainer.state.snapshots.path), trainer.settled_step} - {None}
    store.set(f"{key}/{trainer.comm.rank}", json.dumps(sorted(mine)))
    everybody = [set(json.loads(store.get(f"{key}/{rank}"))) for rank in range(trainer.comm.size("world"))]
    return Resume("snapshot", max(set.intersection(*everybody)))


def _cut(comm: Comm, lived: Lived, cuts: list[Cut]) -> None:
    """Count the messages that the rank waits for from now on, and raise PeerLost at the one that a cut names."""
    lived.messages = 0

    def count() -> None:
        lived.messages += 1
        if any(cut.message == lived.messages for cut in cuts):
            raise PeerLost("the test has cut the connection")

    on_each_message(comm, count)


def on_each_message(comm: Comm, count: Callable[[], None]) -> None:
    """Have `count` called whenever the rank is about to wait for a message of its present generation."""
    if comm._backend is None:
        return  # a rank alone
    if isinstance(comm._backend, LinksBackend):
        links = comm._backend.links
        wait = links.wait

        def counted(operation: Any) -> None:
            count()
            wait(operation)

        links.wait = counted  # type: ignore[method-assign]
    else:
        comm._backend = CountedWaits(comm._backend, count)


class CountedWaits:
    """A backend that calls `count` whenever what it began is waited for."""

    def __init__(self, backend: Backend, count: Callable[[], None]):
        self._backend, self._count = backend, count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if not (name.startswith("start_") or name in ("send", "receive")):
            return method
        return lambda *arguments: _CountedWork(method(*arguments), self._count)


class _CountedWork:
    def __init__(self, work: Any, count: Callable[[], None]):
        self._work, self._count = work, count

    def wait(self) -> None:
        self._count()
        self._work.wait()

    @property
    def done(self) -> bool:
        return bool(self._work.done)
