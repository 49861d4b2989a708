"""What snapshots cost the training thread, and how fast state is copied, summed and replicated to another node.

Two ranks, each with its agent in a process of its own, as in a job; a timed wait stands for a step's computation. The
agents keep each other's replicas over TCP; both nodes are this machine, so that copying, summing, sending, receiving
and checking share its cores, which on two nodes they would not. Then one rank saves a checkpoint from its snapshot, and
as without snapshots from a copy: what memory of the process that takes, and for how long it holds the training up.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.resident_memory import status_bytes
from workers.checkpoint.checkpointer import Checkpointer
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.errors import MantaError
from workers.paths import SHARED_MEMORY
from workers.protocol.messages import Resume
from workers.reporter import Reporter
from workers.snapshot.backup import BackupSender, BackupServer
from workers.snapshot.snapshots import Snapshots
from workers.spec.reading import parse_job_spec
from workers.trainer import Places, Trainer

TARGET_MS = 1.0
RANKS = 2
LAYOUT = "0" * 8
SECONDS = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("snapshots", __doc__)
    options.add_argument(
        "--megabytes", type=float, default=50.0, help="state of each rank, in 10^6 bytes (default: 50)"
    )
    options.add_argument("--wait", type=float, default=0.05, help="seconds that stand for a step (default: 0.05)")
    options.add_argument("--steps", type=int, default=200, help="steps of each part (default: 200)")
    return deliver(measure, options.parse_args(arguments))


@dataclass
class Taken:
    """What one rank saw over the steps of one part, in seconds."""

    stalls: list[float] = field(default_factory=list)
    """On the training thread: start and finish."""
    copies: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)


def measure(options: argparse.Namespace) -> Report:
    """First without replicas, then with them, then with copies on the training thread, for comparison."""
    report = Report("snapshots", options.seed)
    size = int(options.megabytes * 1e6)
    for name, beside, replicas in (
        ("alone", True, False),
        ("replicated", True, True),
        ("on_training_thread", False, False),
    ):
        taken, replications = _run(size, options.steps, options.wait, beside, replicas)
        stalls = [1e3 * seconds for rank in taken for seconds in rank.stalls]
        report.add(
            f"{name}_training_thread_a_step_median",
            round(statistics.median(stalls), 4),
            "ms",
            TARGET_MS if beside else None,
        )
        report.add(f"{name}_training_thread_a_step_p95", round(sorted(stalls)[int(0.95 * (len(stalls) - 1))], 4), "ms")
        if beside:
            for what, seconds in (
                ("copied", [s for t in taken for s in t.copies]),
                ("summed", [s for t in taken for s in t.sums]),
            ):
                report.add(f"{name}_{what}", round(size / statistics.median(seconds) / 1e9, 3), "GB/s")
        if replicas:
            sent, busy = sum(each["sent"] for each in replications), sum(each["seconds"] for each in replications)
            report.add("replicated", round(sum(each["bytes"] for each in replications) / busy / 1e9, 3), "GB/s")
            report.add("replicas_arrived", sent, "steps")
            report.add("replicas_arrived_share", round(sent / (options.steps * RANKS), 4), "ratio")
            report.add("replicas_dropped", sum(each["dropped"] for each in replications), "steps")
            report.add(
                "newest_replica_behind", max(options.steps + 1 - (each["step"] or 0) for each in replications), "steps"
            )
    report.settings = {"ranks": RANKS, "bytes_a_rank": size, "wait_seconds": options.wait, "steps": options.steps}
    for way in ("slot", "copy"):
        saved = _saved(size, way)
        report.add(f"checkpoint_from_{way}_memory_a_parameter", round(saved.bytes_a_parameter, 2), "bytes")
        report.add(f"checkpoint_from_{way}_training_thread", round(1e3 * saved.stall, 2), "ms")
        report.add(f"checkpoint_from_{way}_written_in", round(saved.seconds, 3), "s")
    return report


@dataclass
class Saved:
    """What the first checkpoint of a rank took."""

    bytes_a_parameter: float
    """By which the process grew."""
    stall: float
    """Seconds until the state may change."""
    seconds: float
    """Until the checkpoint was whole."""


def _saved(size: int, way: str) -> Saved:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        saver = context.Process(target=_saver, args=(theirs, Path(folder), shared, size, way))
        saver.start()
        saved: Saved = _answer(ours)
        saver.join()
    return saved


def _saver(connection: Connection, folder: Path, shared: str, size: int, way: str) -> None:
    torch.set_num_threads(1)
    (folder / "corpus.txt").write_text("to be or not to be, that is the question. " * 100, encoding="utf-8")
    hidden = 64 * max(1, round((size / 12 / 96) ** 0.5 / 64))  # 8 layers of 12 hidden^2
    model = {"layers": 8, "hidden_size": hidden, "heads": 1, "sequence_length": 8}
    train = {"steps": 9, "global_batch_size": 1, "micro_batch_size": 1}
    data = {"source": "text", "paths": [str(folder / "corpus.txt")]}
    spec = parse_job_spec({"name": "saved", "model": model, "train": train, "data": data})
    comm = Comm(RankGrid(spec.layout), 0, torch.device("cpu"))
    places = Places("saved", snapshots=shared, checkpoints=str(folder / "durable"))
    trainer = Trainer(spec, comm, Reporter(lambda messages: None), 1e9, places)
    trainer.restore(Resume())
    for _ in range(3):  # both slots have their memory
        trainer.train_step()
    state = trainer.state
    assert state.snapshots is not None and state.checkpoints is not None
    state.snapshots.finish()
    if way == "copy":
        state.checkpoints = Checkpointer(str(folder / "durable"), "saved", spec, trainer.engine, comm, _nothing)
    before, began = status_bytes("VmRSS"), time.perf_counter()
    state.checkpoints.start(trainer.step)
    state.snapshots.finish()
    state.checkpoints.finish_copy()
    stall = time.perf_counter() - began
    state.checkpoints.finish()
    seconds, grown = time.perf_counter() - began, status_bytes("VmRSS") - before
    connection.send(Saved(grown / sum(len(part) for part in trainer.engine.optimizer.parameters), stall, seconds))
    trainer.close()


def _nothing(*event: Any) -> None:
    pass


def _run(size: int, steps: int, wait: float, beside: bool, replicas: bool) -> tuple[list[Taken], list[dict[str, Any]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "workers.trainer"])
    with _folders() as folders, contextlib.ExitStack() as stack:

        def start(target: Any, *arguments: Any) -> Connection:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            return ours

        agents: list[Connection] = []
        if replicas:
            token = secrets.token_hex()
            agents = [start(_agent, folder, rank, token) for rank, folder in enumerate(folders)]
            addresses = [_answer(agent) for agent in agents]
            for rank, agent in enumerate(agents):
                agent.send(addresses[(rank + 1) % RANKS])
        trainers = [start(_trainer, folder, rank, size, steps, wait, beside) for rank, folder in enumerate(folders)]
        for trainer in trainers:
            _answer(trainer)
        for trainer in trainers:
            trainer.send("go")
        taken = [_answer(trainer) for trainer in trainers]
        for agent in agents:
            agent.send("stop")
        return taken, [_answer(agent) for agent in agents]


@contextlib.contextmanager
def _folders() -> Iterator[list[Path]]:
    """A folder in shared memory for each node."""
    root = Path(tempfile.mkdtemp(prefix="manta-benchmark-", dir=SHARED_MEMORY))
    try:
        yield [root / str(rank) for rank in range(RANKS)]
    finally:
        shutil.rmtree(root)


def _answer(connection: Connection) -> Any:
    if not connection.poll(SECONDS):
        raise MantaError("a process of the benchmark did not answer in time")
    try:
        return connection.recv()
    except EOFError as error:
        raise MantaError("a process of the benchmark died") from error


def _trainer(connection: Connection, folder: Path, rank: int, size: int, steps: int, wait: float, beside: bool) -> None:
    torch.set_num_threads(1)
    state = [torch.zeros(size // 12) for _ in range(3)]
    snapshots = Snapshots(folder, rank, state, b"0" * 16, LAYOUT)
    for step in (0, 1):  # memory is there from now on
        snapshots.save(step)
    connection.send("ready")
    connection.recv()
    taken = Taken()
    for step in range(2, steps + 2):
        time.sleep(wait)
        if beside and snapshots.finish():
            taken.stalls.append(snapshots.stall_seconds)
            taken.copies.append(snapshots.copy_seconds)
            taken.sums.append(snapshots.sum_seconds)
        for tensor in state:
            tensor[:1000] = step
        snapshots.start(step)
        if not beside:
            snapshots.finish()
            taken.stalls.append(snapshots.stall_seconds)
    snapshots.wait_for_sums()
    connection.send(taken)
    connection.recv()


def _agent(connection: Connection, folder: Path, rank: int, token: str) -> None:
    server = BackupServer(folder, "127.0.0.1", token, 1)
    connection.send(server.address)
    replicator = BackupSender(folder, rank, LAYOUT, connection.recv(), token, 1)
    connection.recv()
    connection.send(replicator.state.to_json())
    connection.recv()


if __name__ == "__main__":
    sys.exit(main())
