"""Saving beside the training: what is saved, what becomes of a save that fails, and what stays for a roll back."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from checkpoint_programs import bits, is_still, job, lone, trainer_of

from manta.workers.checkpoint import catalog
from manta.workers.checkpoint import checkpointer as module
from manta.workers.checkpoint.catalog import checkpoint_path, complete_checkpoints
from manta.workers.checkpoint.checkpointer import Checkpointer
from manta.workers.checkpoint.checksums import SummingFile
from manta.workers.comm.comm import Comm
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume
from manta.workers.trainer import Trainer

ROLL_BACK_STEPS = 3


@pytest.fixture
def trainer(corpus, tmp_path) -> Iterator[Trainer]:
    """A rank at its start, which keeps one checkpoint where nothing may be undone."""
    recovery = {"nonfinite": "roll_back", "roll_back_steps": ROLL_BACK_STEPS}
    document = job(corpus, {}, model={"layers": 1}, checkpoint={"every_steps": 1, "keep": 1}, recovery=recovery)
    made = lone(document, tmp_path)
    made.restore(Resume())
    yield made
    made.close()


def steps_on_disk(trainer: Trainer) -> list[int]:
    return [manifest.step for _, manifest in complete_checkpoints(trainer.state.checkpoints.folder)]


def save(trainer: Trainer, step: int) -> None:
    trainer.state.checkpoints.start(step)
    trainer.state.checkpoints.finish()


def trained(trainer: Trainer) -> Checkpointer:
    """The checkpoints of a rank after its first step, whose save is over."""
    trainer.train_step()
    trainer.state.checkpoints.finish()
    return trainer.state.checkpoints


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_save_that_failed_is_forgotten_once_the_next_one_is_whole(trainer):
    with patch.object(SummingFile, "write", full):
        save(trainer, 1)
    assert "No space left on device" in trainer.state.checkpoints.failure
    save(trainer, 2)
    assert steps_on_disk(trainer) == [2]
    trainer.state.finish()  # which raises where the newest save has failed


def test_save_writes_the_state_as_it_was_when_the_save_began(trainer):
    """The training goes on once the state is copied aside."""
    trainer.train_step()
    checkpoints, go_on, before = trainer.state.checkpoints, threading.Event(), bits(trainer)
    checkpoints.finish()
    write = SummingFile.write

    def held_up(self: SummingFile, data: Any) -> int:
        go_on.wait(30)
        return write(self, data)

    with patch.object(SummingFile, "write", held_up):
        checkpoints.start(2)
        checkpoints.finish_copy()
        for tensor in trainer.engine.state():
            tensor.mul_(2.0)
        go_on.set()
        checkpoints.finish()
    assert not is_still(trainer, before)
    checkpoints.restore(str(complete_checkpoints(checkpoints.folder)[-1][0]))
    assert is_still(trainer, before)


def test_states_are_copied_into_the_same_memory_which_is_there_before_the_first_save(trainer):
    checkpoints = trainer.state.checkpoints
    checkpoints.prepare_memory()
    checkpoints._writer.submit(lambda: None).result()
    places = {checkpoints._copy_buffer.tensor.data_ptr()}
    for step in (1, 2):
        trainer.train_step()
        checkpoints.finish()
        save(trainer, step)
        places.add(checkpoints._copy_buffer.tensor.data_ptr())
    assert len(places) == 1
    before = bits(trainer)
    checkpoints.restore(str(complete_checkpoints(checkpoints.folder)[-1][0]))
    assert is_still(trainer, before)


def test_small_state_that_a_checkpoint_lacks_is_that_before_the_first_step(trainer):
    trainer.train_step()
    trainer.state.checkpoints.finish()
    trainer.engine.loss_scale.state.fill_(8.0)
    trainer.state.checkpoints.restore(str(complete_checkpoints(trainer.state.checkpoints.folder)[-1][0]))
    assert trainer.engine.loss_scale.state.tolist() == [1.0, 0.0]


def test_rank_that_reads_a_checkpoint_shows_progress(trainer, monkeypatch):
    """However slow the store is: who stands still for five minutes is killed, and would be killed again."""
    trainer.train_step()
    trainer.state.checkpoints.finish()
    moved, progress = [], trainer.comm.progress.__class__
    monkeypatch.setattr(progress, "moved", lambda self, waited=0.0: moved.append(1))
    trainer.state.checkpoints.restore(str(complete_checkpoints(trainer.state.checkpoints.folder)[-1][0]))
    assert len(moved) >= len(trainer.engine.flat.slots)


def test_rank_whose_part_is_saved_says_which_rank_it_waits_for(trainer, store, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    awaited = []

    def waits_for(self: Any, rank: int, *_: Any, **__: Any) -> None:
        awaited.append(rank)
        store.set()

    monkeypatch.setattr(trainer.comm.progress.__class__, "waits_for", waits_for)
    trainer.state.checkpoints.start(1)
    trainer.comm.shared_work.awaited = 3
    trainer.state.checkpoints.finish()
    assert set(awaited) == {3}


def test_no_memory_for_copies_is_taken_if_checkpoints_are_never_due(trainer):
    checkpoints = trainer.state.checkpoints
    saves_every(trainer, 0)
    checkpoints.prepare_memory()
    checkpoints._writer.submit(lambda: None).result()
    assert checkpoints._copy_buffer is None


def _copies_when_asked_for(checkpoints: Checkpointer) -> list[str]:
    """The thread copies nothing before somebody waits for the copy, as on a busy machine; what happened when."""
    asked, log = threading.Event(), list[str]()
    copy_aside, finish_copy = checkpoints._copy_state, checkpoints.finish_copy

    def late(ready: Any) -> Any:
        assert asked.wait(30), "nobody waits for the copy"
        log.append("copied")
        return copy_aside(ready)

    def finish() -> None:
        asked.set()
        finish_copy()
        log.append("waited for")

    checkpoints._copy_state, checkpoints.finish_copy = late, finish
    return log


def test_state_is_copied_during_the_next_step_which_waits_before_changing_it(trainer):
    checkpoints = trained(trainer)
    checkpoints.due = lambda step: False
    before, log = bits(trainer), _copies_when_asked_for(checkpoints)
    checkpoints.start(2)
    assert log == [], "whoever begins a save does not wait for it"
    trainer.train_step()
    assert log[:2] == ["copied", "waited for"]
    checkpoints.finish()
    saved = checkpoint_path(checkpoints.folder, 2, trainer.comm.generation)
    assert not is_still(trainer, before)
    checkpoints.restore(str(saved))
    assert is_still(trainer, before)


def test_step_without_a_copy_to_wait_for_has_no_checkpoint_phase(trainer):
    """Its limit of time is that of a step, and a fault that is to strike while it is saved does not strike there."""
    trainer.train_step()
    checkpoints, seen = trainer.state.checkpoints, list[str]()
    checkpoints.finish()
    checkpoints.due = lambda step: False
    trainer.comm.step.on_phase = lambda step, phase: seen.append(phase)
    trainer.train_step()
    assert "optimizer" in seen and "checkpoint" not in seen


def test_restore_waits_until_the_state_is_copied_for_a_save(trainer):
    checkpoints = trained(trainer)
    log = _copies_when_asked_for(checkpoints)
    checkpoints.start(1)
    trainer.restore(Resume())
    assert log == ["copied", "waited for"]


def test_save_without_memory_for_its_copy_fails_and_does_not_block(trainer):
    checkpoints = trained(trainer)
    checkpoints._buffer = Mock(side_effect=RuntimeError("not enough memory: you tried to allocate 12 bytes"))
    checkpoints.start(1)
    checkpoints.finish_copy()
    checkpoints.finish()
    assert checkpoints.failure == "not enough memory: you tried to allocate 12 bytes"


def test_pruning_leaves_a_checkpoint_before_the_furthest_roll_back(trainer):
    """It undoes up to twice `roll_back_steps` less one."""
    furthest = 2 * ROLL_BACK_STEPS - 1
    for step in range(1, 4 * ROLL_BACK_STEPS):
        save(trainer, step)
        saved = steps_on_disk(trainer)
        assert saved[-1] == step
        assert [each for each in saved if each <= max(1, step - furthest)], f"{saved} at step {step}"


def events_of_saves(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(
        trainer.state.checkpoints, "event", lambda kind, step, message, data: noted.append((kind, message))
    )
    return noted


def test_save_now_saves_a_step_that_is_not_due_once_if_asked_twice(trainer, monkeypatch):
    noted = events_of_saves(trainer, monkeypatch)
    monkeypatch.setattr(trainer.state.checkpoints, "due", lambda step: False)
    for _ in range(2):
        assert trainer.state.checkpoints.save_now(1)
    assert steps_on_disk(trainer) == [1]
    assert [kind for kind, _ in noted] == ["checkpoint_saving", "checkpoint_saved"]


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "a later step"])
def test_save_now_waits_for_a_save_under_way_instead_of_making_it_again(trainer, monkeypatch, step):
    noted = events_of_saves(trainer, monkeypatch)
    trainer.state.checkpoints.start(1)
    assert trainer.state.checkpoints.save_now(step)
    assert steps_on_disk(trainer)[-1] == step
    assert [kind for kind, _ in noted] == ["checkpoint_saving", "checkpoint_saved"] * step


def test_save_now_retries_a_failing_save_a_few_times_and_then_gives_up(trainer, monkeypatch):
    noted = events_of_saves(trainer, monkeypatch)
    with patch.object(SummingFile, "write", full):
        assert not trainer.state.checkpoints.save_now(1, waits=(0.0, 0.001, 0.002))
    failed = [message for kind, message in noted if kind == "checkpoint_failed"]
    assert [message.rpartition("; ")[2] for message in failed] == [
        "it will be retried", "it will be retried", "the state stays in memory"
    ]  # fmt: skip
    assert steps_on_disk(trainer) == []
    with patch.object(SummingFile, "write", full):
        trainer.state.checkpoints.start(2)
        trainer.state.checkpoints.finish()
    assert trainer.state.checkpoints.save_now(2, waits=(0.0,)), "there is room again"


def test_last_step_is_always_due_unless_checkpoints_are_off(trainer):
    checkpoints = trainer.state.checkpoints
    last = checkpoints.spec.train.steps

    def due(every):
        saves_every(trainer, every)
        return [step for step in range(1, last + 1) if checkpoints.due(step)]

    assert due(3) == [3, last]
    assert due(0) == []


def begun(trainer: Trainer, steps: Sequence[int]) -> list[int]:
    """Which of `steps` a generation saves that goes on from it, where generations before should have."""
    checkpoints, saved = trainer.state.checkpoints, list[int]()
    with (
        patch.object(module, "PATIENCE_SECONDS", 60.0),
        patch.object(checkpoints, "start", lambda step, numbers: saved.append(step)),
    ):
        for step in steps:
            checkpoints.begin_missing_save(step)
            checkpoints.finish()
    return saved


def test_checkpoint_missing_at_a_due_step_is_saved_except_at_step_0(trainer):
    save(trainer, 2)
    assert begun(trainer, range(trainer.spec.train.steps + 1)) == [1, 3, 4], "the start is saved by nobody"


def looked_for(comm: Comm, document: dict[str, Any], folder: str) -> tuple[int, list[int]]:
    """How often a rank has looked into the folder, where all but the first find nothing, and what it saves."""
    trainer = trainer_of(comm, document, folder)
    trainer.restore(Resume())
    save(trainer, 1)
    comm.barrier()
    looked = []

    def look(where: str) -> list[Any]:
        looked.append(where)
        return complete_checkpoints(where) if comm.rank == 0 else []

    with patch.object(module.catalog, "complete_checkpoints", look):
        saved = begun(trainer, (0, 1, 2))
    trainer.close()
    return len(looked), saved


def test_one_rank_looks_for_missing_checkpoints_and_tells_the_others(ranks, corpus, tmp_path):
    """A rank that finds something else, of a store that does not answer it, would save by itself, and wait."""
    document = job(corpus, {"data": 2}, model={"layers": 1}, checkpoint={"every_steps": 1})
    by_rank = ranks.run(ParallelConfig(data=2), looked_for, document, str(tmp_path))
    assert by_rank == [(1, [2]), (0, [2])]


def saves_every(trainer: Trainer, steps: int) -> None:
    """From now on it is to save so often."""
    checkpoints = trainer.state.checkpoints
    config = checkpoints.spec.checkpoint.model_copy(update={"every_steps": steps})
    checkpoints.spec = checkpoints.spec.model_copy(update={"checkpoint": config})


def test_checkpoint_due_some_steps_ago_is_missing_until_it_or_a_later_one_is_saved(trainer):
    saves_every(trainer, 2)
    assert begun(trainer, range(4)) == [2, 3]
    save(trainer, 3)
    assert begun(trainer, range(4)) == [2]
    saves_every(trainer, 3)
    assert begun(trainer, [trainer.spec.train.steps]) == [4], "the last step is due whatever was saved right before it"


def test_rank_that_sealed_the_due_checkpoint_does_not_list_the_folder(trainer, monkeypatch):
    save(trainer, 3)
    monkeypatch.setattr(catalog, "complete_checkpoints", lambda folder: pytest.fail(f"looked at all of {folder}"))
    assert begun(trainer, [3]) == []


@pytest.mark.parametrize("undo", ["undo_after", "enter_generation"])
def test_checkpoint_sealed_before_its_step_was_undone_does_not_count_as_saved(trainer, undo):
    """The job would end without its last checkpoint."""
    checkpoints = trainer.state.checkpoints
    save(trainer, 3)
    shutil.rmtree(complete_checkpoints(checkpoints.folder)[0][0])
    checkpoints.undo_after(2) if undo == "undo_after" else checkpoints.enter_generation(0, 2)
    assert begun(trainer, [3]) == [3]


def test_new_generation_makes_the_save_that_the_one_before_missed(trainer, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)
    checkpoints = trainer.state.checkpoints
    saves_every(trainer, 2)
    for _ in range(3):
        trainer.train_step()
    checkpoints.finish()
    for path, _ in complete_checkpoints(checkpoints.folder):
        shutil.rmtree(path)
    checkpoints._sealed = 0  # a process that was not there then
    trainer.state.save_missing_checkpoint()
    checkpoints.finish()
    assert steps_on_disk(trainer) == [3]
    trainer.state.save_missing_checkpoint()
    checkpoints.finish()
    assert steps_on_disk(trainer) == [3]


def test_events_of_a_save_have_its_folder_and_its_size(trainer, monkeypatch):
    noted = []
    monkeypatch.setattr(trainer.state.checkpoints, "event", lambda *event: noted.append(event))
    save(trainer, 1)
    ((path, manifest),) = complete_checkpoints(trainer.state.checkpoints.folder)
    assert noted == [
        ("checkpoint_saving", 1, "saving the checkpoint of step 1", {"path": str(path)}),
        ("checkpoint_saved", 1, "saved the checkpoint of step 1", {"path": str(path), "bytes": manifest.bytes}),
    ]
    assert manifest.bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    noted.clear()
    trainer.state.checkpoints.undo_after(0)
    assert noted == [
        ("checkpoint_deleted", 0, f"deleted checkpoint {path.name}, whose steps were rolled back", {"path": str(path)})
    ]
    assert steps_on_disk(trainer) == []


def test_only_rank_0_reports_and_deletes_checkpoints(trainer, monkeypatch):
    save(trainer, 1)
    noted = []
    monkeypatch.setattr(trainer.state.checkpoints, "event", lambda *event: noted.append(event))
    trainer.comm.rank = 1
    trainer.state.checkpoints.undo_after(0)
    trainer.state.checkpoints._report("checkpoint_saving", 1, "saving", {})
    assert (noted, steps_on_disk(trainer)) == ([], [1])
    with patch.object(SummingFile, "write", full):
        save(trainer, 2)
    path = checkpoint_path(trainer.state.checkpoints.folder, 2, trainer.comm.generation)
    assert (noted, path.is_dir()) == ([], True), "rank 0 may still be writing there"
    with patch.object(module.pruning, "prune") as prune:
        save(trainer, 3)
    prune.assert_not_called()


def test_a_save_that_failed_leaves_nothing_that_would_keep_a_full_disk_full(trainer, monkeypatch):
    noted = events_of_saves(trainer, monkeypatch)
    with patch.object(SummingFile, "write", full):
        save(trainer, 1)
        assert list(Path(trainer.state.checkpoints.folder).iterdir()) == []
        save(trainer, trainer.spec.train.steps)
    failed = [message for kind, message in noted if kind == "checkpoint_failed"]
    assert [message.rpartition("; ")[2] for message in failed] == [
        "training continues",
        "the job cannot finish without it",
    ]


def test_whole_save_removes_earlier_ones_that_failed_or_were_interrupted(trainer):
    folder, trainer.comm.generation = trainer.state.checkpoints.folder, 2
    interrupted, failed, under_way = (checkpoint_path(folder, *each) for each in ((3, 1), (1, 2), (4, 2)))
    for path in (interrupted, failed, under_way):
        path.mkdir(parents=True)
    save(trainer, 2)
    assert (interrupted.exists(), failed.exists(), under_way.exists()) == (False, False, True)
    assert [manifest.generation for _, manifest in complete_checkpoints(folder)] == [2]


def test_manifest_has_job_generation_step_and_spec_and_restores_saved_numbers(trainer):
    checkpoints, numbers = trainer.state.checkpoints, {"recent": [[1.0, 2.0]]}
    trainer.comm.generation = 3
    checkpoints.start(2, numbers)
    checkpoints.finish()
    ((path, manifest),) = complete_checkpoints(checkpoints.folder)
    assert (manifest.job, manifest.generation, manifest.step) == (checkpoints.job, 3, 2)
    assert manifest.spec == trainer.spec.model_dump(mode="json")
    assert manifest.loss_scale is None, "only fp16 has one"
    assert checkpoints.restore(str(path)) == numbers


def test_save_now_stops_retrying_once_a_save_succeeds(trainer, monkeypatch):
    waited, refused, real = [], [], SummingFile.write

    def full_at_first(file, data):
        if len(waited) < 3:
            refused.append(len(waited))
            return full()
        return real(file, data)

    monkeypatch.setattr(module.time, "sleep", waited.append)
    monkeypatch.setattr(SummingFile, "write", full_at_first)
    assert trainer.state.checkpoints.save_now(1, waits=(0.0, 1.0, 2.0, 4.0))
    assert waited == [0.0, 1.0, 2.0]
    assert set(refused) == {1, 2}
    assert trainer.state.checkpoints.failure is None
    assert steps_on_disk(trainer) == [1]
    waited.clear()
    assert trainer.state.checkpoints.save_now(1) and waited == []
    assert sum(module.SAVE_WAITS) >= 10.0, "a file system that is away for a moment"
