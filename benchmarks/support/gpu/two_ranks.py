"""Two ranks on one device, whose messages travel through host memory: the numbers of one rank, and the same bits after
one of them was killed in the middle of a step. Then whether process groups can be repaired in place here."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.gpu.contestants import LEARNING_RATE, batch_of
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.local_ranks import LocalRanks, RanksFailed
from benchmarks.support.report import Report
from manta.workers.calibration.local_ranks import RankDevice
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.repair_self_test import RepairSelfTest
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.errors import MantaError
from manta.workers.paths import SHARED_MEMORY
from manta.workers.protocol.messages import Resume
from manta.workers.protocol.reports import Message, Metrics
from manta.workers.snapshot.files import stored_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

AGREEMENT = 2e-2  # bf16 keeps eight bits; loss and norm are means over many roundings
STEPS, DIES_AT = 8, 5
HOST, SECONDS = "127.0.0.1", 180.0


def measure_pairs(report: Report, size: Size, seed: int, device: torch.device) -> None:
    """Loss and gradient norm of two ranks on one device against those of one."""
    ranks = LocalRanks()
    layouts: dict[str, dict[str, Any]] = {
        "one_rank": {},
        "tensor_2": {"tensor": 2},
        "pipeline_2": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    }
    sized = replace(size, layers=4)
    gathered = {
        name: ranks.run(_few_steps, sized.document(seed, False, parallel=layout), devices=[RankDevice(str(device))])[0]
        for name, layout in layouts.items()
    }
    for name in ("tensor_2", "pipeline_2"):
        pairs = zip(gathered[name], gathered["one_rank"], strict=True)
        furthest = max(abs(a / b - 1.0) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        report.add(f"{name}_largest_difference", round(furthest, 6), "ratio", AGREEMENT)


def _few_steps(comm: Comm, spec: JobSpec) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps."""
    engine = Engine(spec, comm)
    engine.initialise(spec.train.seed)
    batch = batch_of(spec, comm.device)
    steps = [engine.step(batch, spec.train.global_batch_size, LEARNING_RATE, 0) for _ in range(3)]
    return [(step.loss, step.grad_norm) for step in steps]


@dataclass(frozen=True)
class Trained:
    """What a rank knows at the end."""

    losses: dict[int, float]
    """By step; rank 0's."""
    state: str
    """Digest of its parameters and moments."""


def measure_kill(report: Report, size: Size, seed: int, device: torch.device) -> None:
    """A job of two ranks of which one is killed inside of a step's backward, and which goes on from its snapshots."""
    ranks = LocalRanks()
    document = size.document(seed, False, parallel={"tensor": 2}, train={"steps": STEPS, "deterministic_kernels": True})
    document["checkpoint"] = {"every_steps": 0, "snapshot_every_steps": 1}

    def train(folder: str, resume: int | None, dies_at: int) -> list[Trained]:
        return ranks.run(_train, document, folder, resume, dies_at, devices=[RankDevice(str(device))], seconds=SECONDS)

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        undisturbed = train(f"{folder}/undisturbed", None, 0)
        with suppress(RanksFailed):
            train(f"{folder}/killed", None, DIES_AT)
        common = set.intersection(*(set(stored_steps(f"{folder}/killed", rank)) for rank in (0, 1)))
        if not common or max(common) >= STEPS:
            raise MantaError(f"after the kill the ranks have the steps {sorted(common)} in common")
        began = time.monotonic()
        after = train(f"{folder}/killed", max(common), 0)
        seconds = time.monotonic() - began
    pairs = [(undisturbed[0].losses[step], loss) for step, loss in after[0].losses.items() if step > max(common)]
    report.add("kill_steps_done_again", DIES_AT - 1 - max(common), "steps", 1)
    report.add("kill_same_bits", [rank.state for rank in after] == [rank.state for rank in undisturbed], "bool", True)
    report.add("kill_largest_difference", max(abs(a / b - 1.0) for a, b in pairs), "ratio", AGREEMENT)
    report.add("kill_new_processes_to_end", round(seconds, 2), "s")


def _train(comm: Comm, spec: JobSpec, folder: str, resume: int | None, dies_at: int) -> Trained:
    losses: dict[int, float] = {}

    def take(messages: list[Message]) -> None:
        rows = [row for each in messages if isinstance(each.payload, Metrics) for row in each.payload.rows]
        losses.update((row["step"], row["loss"]) for row in rows)

    def reached(step: int, phase: str) -> None:
        if (step, phase) == (dies_at, "backward") and comm.rank == 1:
            trainer.state.snapshots.finish()  # what is tried is not how fast it copies
            os.kill(os.getpid(), signal.SIGKILL)

    gpu.use_for(spec, comm.device)
    reporter = Reporter(take)
    trainer = Trainer(spec, comm, reporter, 1e12, StatePaths("killed", snapshots=folder))
    trainer.restore(Resume() if resume is None else Resume("snapshot", resume))
    if dies_at:
        comm.step.on_phase = reached
    trainer.train()
    reporter.close()
    state = hashlib.blake2b(digest_size=16)
    for tensor in trainer.engine.state():
        state.update(tensor.cpu().numpy().data)
    trainer.close()
    return Trained(losses, state.hexdigest())


def measure_repair(report: Report, device: torch.device) -> None:
    """The self-test that a job's first generation makes: over NCCL between two GPUs or, where there is one, between two
    ranks on it, which only NCCL 2.30 allows; over gloo on a CPU."""
    spec = parse_job_spec(Size(2, 64, 4, 32, 2, vocabulary_size=512).document(1, False, parallel={"data": 2}))
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=_try_repair, args=(theirs, spec, rank, store.port, str(device)), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        self_test = _answer(pipes[0][0])
    finally:
        for process in processes:
            process.kill()
            process.join()
    if device.type == "cuda" and torch.cuda.device_count() < 2 and not self_test.passed:
        raise MantaError(f"it takes two GPUs here, or an NCCL that has two ranks on one: {self_test.problem}")
    report.add("repair_in_place_works", self_test.passed, "bool", True)
    report.add("repair_self_test", self_test.seconds, "s")
    report.settings["repair_self_test"] = self_test.to_json()


def _answer(connection: Connection) -> RepairSelfTest:
    if not connection.poll(SECONDS):
        raise MantaError(f"the self-test did not end within {SECONDS:.0f} s")
    try:
        self_test: RepairSelfTest = connection.recv()
    except EOFError as error:
        raise MantaError("a rank of the self-test died") from error
    return self_test


def _try_repair(connection: Connection, spec: JobSpec, rank: int, port: int, device: str) -> None:
    if device.startswith("cuda"):
        if torch.cuda.device_count() < 2:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    comm = Comm(RankGrid(spec.layout), rank, torch.device(device), "process_groups", in_place=True)
    store = dist.TCPStore(HOST, port, is_master=False)
    connection.send(comm.try_repair(store, 1))
    threading.Event().wait()  # until it is killed: where it ended before the other has heard, that would lose a peer
