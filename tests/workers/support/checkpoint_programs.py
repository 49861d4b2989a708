"""Programs and helpers of the checkpoint tests: jobs, saving what was loaded, states in layout-free form."""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_specs import document
from reported import events_of, rows_of

from manta.workers.checkpoint import catalog, checkpointer, checksums
from manta.workers.checkpoint.catalog import MANIFEST, manifest_of, seal
from manta.workers.checkpoint.checksums import SummingFile
from manta.workers.checkpoint.contents import CONTENTS
from manta.workers.checkpoint.durable import rectangles_of
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointError
from manta.workers.parallel.data.flat import Range
from manta.workers.protocol.messages import Resume
from manta.workers.protocol.reports import Message
from manta.workers.snapshot.files import snapshot_files, stored_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

Placed = tuple[str, tuple[int, ...], torch.Tensor]
"""A rectangle of a layout-free tensor: `kind.name`, offsets, values."""
SMALL = {"bucket_megabytes": 0.004}
EXPERTS: dict[str, dict[str, Any]] = {
    "e1": {},
    "e1 t2": {"tensor": 2},
    "e2": {"data": 2, "expert": 2},
    "e3 t2 small buckets": {"data": 3, "expert": 3, "tensor": 2, **SMALL},
    "e2 d4 zero 0 small buckets": {"data": 4, "expert": 2, "zero": 0, **SMALL},
    "e3 d6": {"data": 6, "expert": 3, "expert_dispatch": "all_to_all"},
    "e2 t2 c2 d2": {"data": 2, "context": 2, "expert": 2, "tensor": 2},
    "e6 t2 d3, whole experts": {"data": 3, "expert": 6, "expert_tensor": 1, "tensor": 2},
    "e2 t2 zero 0, whole experts": {"tensor": 2, "expert": 2, "expert_tensor": 1, "zero": 0},
    "e2 p2 zb-v": {"pipeline": 2, "data": 2, "expert": 2, "schedule": "zb-v", "virtual_stages": 2},
}
"""Layouts of a model of experts, OF_EXPERTS."""
OF_EXPERTS = {
    "family": "llama", "hidden_size": 16, "ffn_hidden_size": 24, "bias": False,
    "moe": {
        "experts": 6, "per_token": 2, "ffn_hidden_size": 10, "every": 2, "shared": 1,
        "balance": {"bias_rate": 0.001},
    },
}  # fmt: skip


def job(corpus: str, parallel: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A few steps of a small model: a vocabulary that nothing divides, fewer key-value heads than tensor ranks."""
    model = {"vocabulary_size": 257, "kv_heads": 2, **sections.pop("model", {})}
    few = {"micro_batch_size": 1 if parallel.get("schedule") == "interleaved" else 2}  # it takes one for each stage
    train = {"steps": 4, "global_batch_size": 12, **few, "optimizer": {"warmup_steps": 2}, **sections.pop("train", {})}
    return document(model=model, data={"paths": [corpus]}, train=train, parallel=parallel, **sections)


def trainer_of(
    comm: Comm,
    document: dict[str, Any],
    folder: str | Path,
    tell: Callable[[list[Message]], None] | None = None,
    **places: Any,
) -> Trainer:
    """A rank's trainer that keeps its checkpoints in `folder`; `places`: where else it keeps something."""
    reporter = Reporter(tell or (lambda messages: None))
    return Trainer(
        parse_job_spec(document), comm, reporter, 1e12, StatePaths("test", checkpoints=str(folder), **places)
    )


def lone(document: dict[str, Any], folder: str | Path, generation: int = 1, **places: Any) -> Trainer:
    """The trainer of a job of one rank, in this process."""
    comm = Comm(RankGrid(parse_job_spec(document).layout), 0, torch.device("cpu"))
    comm.generation = generation
    return trainer_of(comm, document, folder, **places)


def save(trainer: Trainer) -> None:
    """Save the state as it is."""
    assert trainer.state.checkpoints is not None
    trainer.state.checkpoints.start(trainer.step)
    trainer.state.checkpoints.finish()


def reseal(path: Path) -> None:
    """Have the manifest say what now lies at `path`, as anybody can who may write there."""
    manifest = manifest_of(path)
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST}
    step = manifest.block_bytes
    blocks = {
        name: [zlib.crc32(content[at : at + step]) for at in range(0, len(content), step)]
        for name, content in contents.items()
    }
    seal(path, replace(manifest, files={name: len(content) for name, content in contents.items()}, blocks=blocks))


def make_older(path: Path) -> None:
    """Make the checkpoint one of before there was `contents.json`."""
    (path / CONTENTS).unlink()
    reseal(path)


def bits(trainer: Trainer) -> list[torch.Tensor]:
    """A copy of everything that a checkpoint may change in a rank."""
    return [tensor.clone() for tensor in (*trainer.engine.state(), trainer.engine.flat.parameters)]


def is_still(trainer: Trainer, before: list[torch.Tensor]) -> bool:
    """Whether the state is, to the bit, what `bits` gave."""
    return all(torch.equal(now, then) for now, then in zip(bits(trainer), before, strict=True))


def placed(engine: Engine, kind: str, part: torch.Tensor, held: list[Range]) -> list[Placed]:
    """The rectangles in `part`, which holds the ranges `held` of the flat buffer."""
    rectangles = rectangles_of(engine.flat, held, held, owned_only=False, tensor_index=engine.comm.index("tensor"))
    return [(f"{kind}.{rectangle.name}", rectangle.offsets, rectangle.view(part).clone()) for rectangle in rectangles]


@dataclass
class RankOutcome:
    """What one rank found in a checkpoint, and did with it."""

    loaded: list[Placed]
    """Parameters and moments that the rank keeps, right after the restore."""
    computing: list[Placed]
    """The parameters that it computes with, right after the restore."""
    loss_scale: list[float]
    router_bias: list[float]
    """Empty if the model's routers have none."""
    statistics: list[tuple[float, float]]
    """(loss, gradient norm) of each further step."""


def _look(trainer: Trainer) -> RankOutcome:
    engine, optimizer = trainer.engine, trainer.engine.optimizer
    loaded = [
        each
        for part in optimizer.parts()
        for each in placed(engine, part.name, torch.cat(part.tensors), optimizer.held)
    ]
    loaded += placed(engine, "model", torch.cat(optimizer.frozen or [torch.empty(0)]), optimizer.frozen_stored)
    computing = placed(engine, "model", engine.flat.parameters, engine.flat.values.ranges)
    bias = [each for part in engine.parts() if part.name == "router_bias" for each in part.tensors[0].tolist()]
    return RankOutcome(loaded, computing, engine.loss_scale.state.tolist(), bias, [])


def train_and_save(comm: Comm, document: dict[str, Any], folder: str, steps: int) -> RankOutcome:
    """Train `steps` from the start and save."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
    _train(trainer, steps)
    save(trainer)
    comm.barrier()
    return _look(trainer)


def load_and_save(comm: Comm, document: dict[str, Any], path: str, step: int, folder: str, more: int) -> RankOutcome:
    """Load the checkpoint of `step` at `path`, save it again below `folder`, and train `more` steps."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume("checkpoint", step, path))
    state_seen = _look(trainer)
    save(trainer)
    comm.barrier()
    state_seen.statistics += _train(trainer, more)
    return state_seen


def _train(trainer: Trainer, steps: int) -> list[tuple[float, float]]:
    steps_done = [trainer.train_step() for _ in range(steps)]
    return [(statistics.loss, statistics.grad_norm) for statistics in steps_done]


def train_and_snapshot(comm: Comm, document: dict[str, Any], folder: str, steps: int) -> RankOutcome:
    """Train `steps` from the start, with snapshots in `folder`."""
    trainer = snapshotted(comm, document, folder)
    trainer.restore(Resume())
    _train(trainer, steps)
    assert trainer.state.snapshots is not None
    trainer.state.snapshots.wait_for_sums()
    comm.barrier()
    return _look(trainer)


def snapshotted(comm: Comm, document: dict[str, Any], folder: str, messages: list[Message] | None = None) -> Trainer:
    """A rank's trainer that keeps snapshots in `folder` and no checkpoints."""
    reporter = Reporter((messages if messages is not None else []).extend)
    return Trainer(parse_job_spec(document), comm, reporter, 1e12, StatePaths("test", folder))


@dataclass
class Resharded(RankOutcome):
    """What one rank of a new layout found in the snapshots of an old one."""

    paths: tuple[str, ...]
    """All snapshot files after its first one."""
    rows: list[int]
    """Steps of the rows that it reported before any step of its own."""


def load_from_memory(
    comm: Comm, document: dict[str, Any], paths: tuple[str, ...], step: int, folder: str, more: int
) -> Resharded:
    """Go on from the snapshot files `paths` of another layout, with snapshots in `folder`, for `more` steps."""
    messages: list[Message] = []
    trainer = snapshotted(comm, document, folder, messages)
    trainer.restore(Resume("memory", step, paths=paths))
    state_seen = _look(trainer)
    comm.barrier()
    left = tuple(str(each.path) for each in snapshot_files(folder))
    comm.barrier()
    state_seen.statistics += _train(trainer, more)
    assert trainer.state.snapshots is not None
    trainer.state.snapshots.wait_for_sums()
    comm.barrier()
    trainer.reporter.close()
    rows = [row["step"] for row in rows_of(messages)]
    return Resharded(**vars(state_seen), paths=left, rows=rows)


def fail_to_load_from_memory(
    comm: Comm, document: dict[str, Any], paths: tuple[str, ...], step: int, folder: str
) -> tuple[str, str, bool]:
    """Try it with files that will not do: (class of the error, its message, whether the state is unchanged)."""
    trainer = snapshotted(comm, document, folder)
    trainer.engine.initialise(1)
    before = bits(trainer)
    try:
        trainer.restore(Resume("memory", step, paths=paths))
    except CheckpointError as error:
        return type(error).__name__, str(error), is_still(trainer, before)
    return "none", "", is_still(trainer, before)


def load_damaged(comm: Comm, document: dict[str, Any], path: str) -> tuple[str, str, bool]:
    """Try to load what cannot be loaded: (class of the error, its message, whether the state is unchanged)."""
    trainer = trainer_of(comm, document, Path(path).parent)
    trainer.restore(Resume())
    before = bits(trainer)
    try:
        trainer.restore(Resume("checkpoint", 2, path))
    except CheckpointError as error:
        return type(error).__name__, str(error), is_still(trainer, before)
    return "none", "", is_still(trainer, before)


def save_on_a_full_disk(comm: Comm, document: dict[str, Any], folder: str) -> list[tuple[str, str]]:
    """Save two steps; at the first one the last rank's disk is full. (type, message) of all events."""
    messages: list[Message] = []
    trainer = trainer_of(comm, document, folder, messages.extend)
    trainer.restore(Resume())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (1, 2):
        trainer.train_step()
        if step == 1 and comm.rank == comm.size("world") - 1:
            with patch.object(SummingFile, "write", full):
                save(trainer)
        else:
            save(trainer)
    comm.barrier()
    trainer.reporter.close()
    return [(event["type"], event["message"]) for event in events_of(messages)]


def leave_while_saving(comm: Comm, document: dict[str, Any], folder: str) -> tuple[int, str | None]:
    """Have the generation end when the first of a save is written: how often something was, and why the save failed."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
    trainer.train_step()
    real, writes = SummingFile.write, []

    def write(*given: Any) -> int:
        if not writes:
            comm.end(comm.generation)
        writes.append(given)
        return real(*given)

    with patch.object(SummingFile, "write", write), patch.object(checksums, "BUFFER_BYTES", 1024):
        save(trainer)
    assert trainer.state.checkpoints is not None
    return len(writes), trainer.state.checkpoints.failure


def leave_while_sealing(comm: Comm, document: dict[str, Any], folder: str) -> tuple[str | None, list[list[int]]]:
    """Have the generation end while all parts of a save are written and the store does not take its manifest: why the
    save failed, as the rank sees it that rests, and the steps that are whole then, and once the store has answered."""
    sealing, may_seal, sealed, real = threading.Event(), threading.Event(), threading.Event(), catalog.seal
    trainer = trainer_of(comm, document, folder)
    checkpoints = trainer.state.checkpoints
    assert checkpoints is not None
    checkpoints.event = lambda kind, *_: sealed.set() if kind == "checkpoint_saved" else None
    trainer.restore(Resume())
    trainer.train_step()

    def late(*given: Any) -> None:
        sealing.set()
        may_seal.wait(60)
        real(*given)

    with patch.object(catalog, "seal", late), patch.object(checkpointer, "CLOSE_SECONDS", 0.01):
        checkpoints.start(1)
        if comm.rank == 0:
            sealing.wait(60)
        else:
            checkpoints.finish()
        comm.close()
        trainer.rest()
        comm.generation += 1  # as the next one begins
        failure, whole = checkpoints.failure, [[each.step for _, each in catalog.complete_checkpoints(folder)]]
        may_seal.set()
        if comm.rank == 0:
            sealed.wait(60)
    whole.append([each.step for _, each in catalog.complete_checkpoints(folder) if each.generation < comm.generation])
    return failure, whole


@dataclass
class Delayed:
    """What one rank did while another one's save did not end."""

    outcome: RankOutcome
    held_up: float
    """Seconds that the slowest step took while it did not."""
    events: list[tuple[str, int]]
    """(Type, step)."""


def train_beside_a_slow_save(comm: Comm, document: dict[str, Any], folder: str, ends_after: int, rank: int) -> Delayed:
    """Train to the end; the first save ends on `rank` only once step `ends_after` is committed. Rank 0 is held up when
    all others are done."""
    messages: list[Message] = []
    trainer = trainer_of(comm, document, folder, messages.extend)
    assert trainer.state.checkpoints is not None
    trainer.restore(Resume())
    may_end, statistics, seconds = threading.Event(), [], []

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            may_end.wait(60)
            return real(*given)

        return call if comm.rank == rank else real

    owner, name = (catalog, "seal") if rank == 0 else (SummingFile, "write")
    with (
        patch.object(owner, name, late(getattr(owner, name))),
        patch.object(checkpointer, "PATIENCE_SECONDS", 0.01),
    ):
        while trainer.step < trainer.spec.train.steps:
            began = time.monotonic()
            statistics += _train(trainer, 1)
            seconds.append(time.monotonic() - began)
            if trainer.step == ends_after:
                may_end.set()
                trainer.state.checkpoints.finish()
                comm.barrier()
        trainer.state.finish()
    trainer.reporter.close()
    outcome = _look(trainer)
    outcome.statistics = statistics
    events = [(event["type"], event["step"]) for event in events_of(messages)]
    return Delayed(outcome, max(seconds[:ends_after]), events)


def slots_beside_a_slow_save(
    comm: Comm, document: dict[str, Any], folder: str, ends_after: int, rank: int
) -> list[tuple[int, ...]]:
    """The steps in this rank's slots after each step; the first save ends on `rank` only once step `ends_after` is
    committed."""
    trainer = trainer_of(comm, document, f"{folder}/durable", snapshots=f"{folder}/shared")
    assert trainer.state.snapshots is not None and trainer.state.checkpoints is not None
    trainer.restore(Resume())
    may_end, kept = threading.Event(), []
    owner, name = (catalog, "seal") if rank == 0 else (SummingFile, "write")  # the others are done before rank 0 seals
    real = getattr(owner, name)

    def late(*given: Any) -> Any:
        assert comm.rank != rank or may_end.wait(60)
        return real(*given)

    with patch.object(owner, name, late), patch.object(checkpointer, "PATIENCE_SECONDS", 0.01):
        while trainer.step < trainer.spec.train.steps:
            trainer.train_step()
            trainer.state.snapshots.finish()
            kept.append(tuple(stored_steps(f"{folder}/shared", comm.rank)))
            if trainer.step == ends_after:
                may_end.set()
                trainer.state.checkpoints.finish()
                comm.barrier()
        trainer.state.finish()
    trainer.close()
    return kept
