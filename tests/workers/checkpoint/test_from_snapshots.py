"""A checkpoint is written from the snapshot of its step: the same bytes as from a copy, without the memory of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_programs import job, lone, save, slots_beside_a_slow_save
from engine_specs import axes
from held_memory import held_bytes

from manta.workers.checkpoint import checkpointer
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import snapshot_path, stored_steps
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshot_file import SnapshotFile
from manta.workers.storage.locations import parse_location
from manta.workers.trainer import Trainer

STEPS = 8
Make = Callable[..., Trainer]


@pytest.fixture
def make(corpus, tmp_path, monkeypatch) -> Iterator[Make]:
    """Ranks that keep snapshots as well, and wait for no save."""
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 0.01)
    made: list[Trainer] = []

    def of(name: str, shared: str | None = "shared", train: dict[str, Any] | None = None, **checkpoint: Any) -> Trainer:
        sections = {
            "train": {"steps": STEPS, **(train or {})},
            "checkpoint": {"every_steps": 2, "keep": 9, **checkpoint},
        }
        folder = None if shared is None else str(tmp_path / name / shared)
        trainer = lone(job(corpus, {}, model={"layers": 2}, **sections), tmp_path / name, snapshots=folder)
        trainer.restore(Resume())
        made.append(trainer)
        return trainer

    yield of
    for trainer in made:
        trainer.close()


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step()
    assert trainer.state.snapshots is not None
    trainer.state.snapshots.finish()


def kept(trainer: Trainer) -> list[int]:
    return stored_steps(trainer.state.snapshots.path.parent, 0)


def saved(trainer: Trainer) -> list[int]:
    trainer.state.checkpoints.finish()
    return [manifest.step for _, manifest in complete_checkpoints(trainer.state.checkpoints.folder)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "frozen": ["embedding", "layers.0"]},
        {"frozen": ["embedding"]},
    ],
    ids=["fp32", "bf16", "fp16", "bf16, some frozen", "fp32, some frozen"],
)
def test_checkpoint_from_a_snapshot_equals_one_from_a_copy_and_takes_no_memory(make, settings):
    files = []
    for name, shared in (("copied", None), ("from the slot", "shared")):
        trainer = make(name, shared, settings, every_steps=3)
        for _ in range(3):
            trainer.train_step()
        assert saved(trainer) == [3]
        ((folder, manifest),) = complete_checkpoints(trainer.state.checkpoints.folder)
        files.append(
            ({file.name: file.read_bytes() for file in Path(folder).glob("__*")}, manifest.blocks["__0_0.distcp"])
        )
        assert (trainer.state.checkpoints._copy_buffer is None) == (shared is not None)
    assert files[0] == files[1] and len(files[0][0]) == 1


def test_slot_being_written_out_is_kept_and_new_snapshots_use_the_other(make, store):
    trainer = make("job")
    train(trainer, 1)
    assert trainer.state.snapshot_figures()["snapshot_every_steps"] == 1
    train(trainer, 1)
    for step in (3, 4, 5):
        train(trainer, 1)
        assert kept(trainer) == [2, step]
        assert trainer.state.snapshot_figures()["snapshot_every_steps"] == step - 2, "what a crash may cost now"
    store.set()
    assert saved(trainer) == [2]
    train(trainer, 1)
    assert kept(trainer) == [5, 6], "the agreement of step 6 has found nobody who saves"
    assert trainer.state.snapshot_figures()["snapshot_every_steps"] == 1
    trainer.state.checkpoints.restore(str(complete_checkpoints(trainer.state.checkpoints.folder)[0][0]))


def test_step_with_a_due_checkpoint_also_gets_a_snapshot(make):
    trainer = make("job", snapshot_every_steps=5)
    train(trainer, 2)
    assert kept(trainer) == [0, 2] and saved(trainer) == [2]
    train(trainer, 1)
    assert kept(trainer) == [0, 2]


def test_save_from_a_snapshot_slot_that_changes_meanwhile_fails(make, store, monkeypatch):
    """Others may open its memory by its name. What was written has sums that fit, and would be believed for ever."""
    trainer, events = make("job"), []
    monkeypatch.setattr(trainer.state.checkpoints, "event", lambda *event: events.append(event[:3]))
    train(trainer, 2)
    trainer.state.snapshots.wait_for_sums()
    path = trainer.state.snapshots.path
    file = SnapshotFile.open(path)
    at = file.form.payload_at(next(slot for slot in (0, 1) if file.step(slot) == 2)) + 1000
    file.close()
    with path.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte[0] ^ 1]))
    store.set()
    assert saved(trainer) == []
    (failed,) = [message for kind, _, message in events if kind == "checkpoint_failed"]
    assert "of step 2 are not what was written" in failed and str(path) in failed
    train(trainer, 2)
    assert saved(trainer) == [4]


def test_restore_waits_until_the_save_from_its_slot_is_written(make, store):
    trainer = make("job")
    train(trainer, 2)
    restored = threading.Thread(target=trainer.restore, args=(Resume("snapshot", 1),))
    restored.start()
    restored.join(0.3)
    assert restored.is_alive()
    store.set()
    restored.join(60)
    assert saved(trainer) == [2] and trainer.step == 1 and trainer.state.snapshots.protected_step is None


def test_roll_back_of_a_step_that_is_being_saved_releases_its_slot(corpus, tmp_path, store):
    recovery = {"nonfinite": "roll_back", "roll_back_steps": 1}
    document = job(corpus, {}, train={"steps": STEPS}, checkpoint={"every_steps": 2}, recovery=recovery)
    trainer = lone(document, tmp_path / "durable", snapshots=str(tmp_path / "shared"))
    trainer.restore(Resume())
    train(trainer, 2)
    threading.Timer(0.2, store.set).start()
    trainer.engine.flat.parameters.fill_(float("inf"))
    train(trainer, 1)
    back = trainer.step
    assert back <= 2 and kept(trainer)[-1] == back and trainer.state.snapshots.protected_step is None
    train(trainer, 2)
    assert kept(trainer) == [back + 1, back + 2]
    trainer.close()


def test_uploads_share_the_memory_of_snapshots_and_follow_it_to_a_new_file(make, monkeypatch):
    began: list[Any] = []

    class Uploads:
        def __init__(self, buffer: Any):
            self.buffer = buffer
            self.start = lambda: began.append(buffer.bytes)
            self.close = lambda: began.append("closed")

    trainer = make("job")
    checkpoints, snapshots = trainer.state.checkpoints, trainer.state.snapshots
    monkeypatch.setattr(checkpointer, "Uploads", Uploads)
    monkeypatch.setattr(checkpoints, "folder", str(parse_location("s3://bucket/job")))
    for _ in range(2):
        checkpoints._prepare()
    size = snapshots._file.form.size
    assert began == [size] and checkpoints._copy_buffer is None
    part = snapshots.protect(0, bytes).part("model")
    where = snapshots.memory_file.offset_of(memoryview(part.numpy()).cast("B"))
    assert where in {snapshots._file.form.payload_at(slot) for slot in (0, 1)}
    assert snapshots.memory_file.offset_of(memoryview(torch.ones(4).numpy()).cast("B")) is None
    snapshots.path.unlink()
    snapshots.clear()
    checkpoints._prepare()
    assert began == [size, "closed", size]
    checkpoints._uploads = None


@pytest.mark.parametrize(
    ("layout", "slow"), [pytest.param((2, 1, 1), 1, marks=pytest.mark.soak), ((1, 2, 2), 0)], ids=str
)
def test_all_ranks_hold_the_same_step_until_the_last_has_written(ranks, corpus, tmp_path, layout, slow):
    """Whatever dies meanwhile, there is a step that all ranks have."""
    document = job(corpus, axes(layout), train={"steps": STEPS}, checkpoint={"every_steps": 4, "keep": 9})
    by_rank = ranks.run(ParallelConfig(**axes(layout)), slots_beside_a_slow_save, document, str(tmp_path), 7, slow)
    assert by_rank[0] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (4, 7), (7, 8)]
    for steps in zip(*by_rank, strict=True):  # of all ranks, after each step
        assert len(set(steps)) == 1


def test_checkpoint_is_written_from_snapshots_in_the_daemons_memory(make, tmp_path, corpus):
    from manta.workers.snapshot.node_memory import MemoryServer

    keeper = MemoryServer(tmp_path / "memory.sock", tmp_path / "shared")
    memory = SnapshotMemory("node_memory", tmp_path / "memory.sock")
    document = job(corpus, {}, checkpoint={"every_steps": 2})
    trainer = lone(document, tmp_path / "durable", snapshots=str(tmp_path / "shared" / "job"), memory=memory)
    trainer.restore(Resume())
    train(trainer, 2)
    assert saved(trainer) == [2] and snapshot_path(tmp_path / "shared" / "job", 0) != trainer.state.snapshots.path
    assert held_bytes(keeper) == trainer.state.snapshots.bytes_outside > 0
    trainer.close()
    keeper.close()


def test_save_before_the_end_is_written_from_the_snapshot(make):
    trainer = make("job", snapshot_every_steps=5, every_steps=7)
    train(trainer, 3)
    with patch.object(trainer.state.checkpoints, "_copy_state", side_effect=AssertionError):
        trainer.state.save_before_end()
    assert saved(trainer) == [3]
    save(trainer)
