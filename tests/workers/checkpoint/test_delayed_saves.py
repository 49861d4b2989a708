"""Saves that are due while the one before is still being written: the training goes on, and they are made later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_programs import (
    job,
    leave_while_saving,
    leave_while_sealing,
    lone,
    train_and_save,
    train_beside_a_slow_save,
)
from engine_specs import axes

from manta.workers.checkpoint import checkpointer
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.checksums import SummingFile
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import Trainer

STEPS = 8


@pytest.fixture
def trainer(corpus, tmp_path, monkeypatch) -> Iterator[Trainer]:
    """A rank that is to save every other step, and waits for no save."""
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 0.01)
    document = job(corpus, {}, model={"layers": 1}, train={"steps": STEPS}, checkpoint={"every_steps": 2, "keep": 9})
    made = lone(document, tmp_path)
    made.restore(Resume())
    yield made
    made.close()


def noted_of(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    noted: list[tuple[str, int, str]] = []
    monkeypatch.setattr(trainer.state.checkpoints, "event", lambda *event: noted.append(event[:3]))
    return noted


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step()


def saved(trainer: Trainer) -> list[int]:
    trainer.state.checkpoints.finish()
    return [manifest.step for _, manifest in complete_checkpoints(trainer.state.checkpoints.folder)]


def test_save_that_is_due_during_another_is_made_at_the_first_step_after_it(trainer, store, monkeypatch):
    noted = noted_of(trainer, monkeypatch)
    train(trainer, 6)
    delayed = [(step, message) for kind, step, message in noted if kind == "checkpoint_delayed"]
    assert [step for step, _ in delayed] == [4], "step 6 is due too, and nothing new happens"
    assert delayed[0][1].startswith("the checkpoint due at step 4 waits: that of step 2 has been saving for ")
    store.set()
    assert saved(trainer) == [2]
    train(trainer, 1)
    assert saved(trainer) == [2, 7]
    train(trainer, 1)
    assert saved(trainer) == [2, 7, 8]
    assert [step for kind, step, _ in noted if kind == "checkpoint_saving"] == [2, 7, 8]


def test_delayed_save_is_dropped_when_a_new_generation_is_entered(trainer, store):
    train(trainer, 4)
    checkpoints = trainer.state.checkpoints
    assert checkpoints.is_needed(5)
    store.set()
    checkpoints.finish()
    checkpoints.enter_generation(0, 4)
    assert not checkpoints.is_needed(5) and checkpoints.is_needed(6)


def test_save_of_the_last_step_waits_for_the_one_under_way(trainer, store):
    train(trainer, STEPS - 1)
    last = threading.Thread(target=train, args=(trainer, 1))
    last.start()
    last.join(0.3)
    assert last.is_alive(), "there is nothing to train meanwhile"
    store.set()
    last.join(60)
    assert saved(trainer) == [2, STEPS]


def test_save_before_the_end_waits_for_the_store_instead_of_being_delayed(trainer, store):
    """As a pause asks for it."""
    train(trainer, 4)
    threading.Timer(0.1, store.set).start()
    trainer.state.save_before_end()
    assert saved(trainer) == [2, 4]
    train(trainer, 1)
    assert saved(trainer) == [2, 4], "the one that waited has been made"


def test_saves_that_take_no_longer_than_the_patience_are_made_where_they_are_due(trainer, store, monkeypatch):
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 60.0)
    train(trainer, 2)
    threading.Timer(0.1, store.set).start()
    train(trainer, 4)
    assert saved(trainer) == [2, 4, 6]


def test_steps_that_are_due_during_one_save_share_its_patience(trainer, store, monkeypatch):
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 0.5)
    train(trainer, 4)
    with patch.object(checkpointer, "wait", wraps=checkpointer.wait) as waited:
        train(trainer, 3)
    left = [call.args[1] for call in waited.call_args_list]
    assert len(left) == 3 and max(left) < 0.1


def test_delayed_save_is_dropped_when_a_state_is_restored(trainer, store):
    """A rank that is new would not know, and not ask with the others at the next step."""
    train(trainer, 4)
    assert trainer.state.checkpoints.is_needed(5)
    store.set()
    trainer.state.checkpoints.finish()
    trainer.restore(Resume())
    assert not trainer.state.checkpoints.is_needed(5)


def test_save_of_ranks_that_leave_their_generation_fails_and_seals_no_checkpoint(ranks, corpus, tmp_path):
    """Whoever takes too long to come to rest is killed."""
    document = job(corpus, axes((1, 1, 2)), model={"layers": 1}, checkpoint={"every_steps": 0})
    for writes, failure in ranks.run(ParallelConfig(data=2), leave_while_saving, document, str(tmp_path)):
        assert writes < 5, "of dozens"
        assert failure is not None
    assert complete_checkpoints(tmp_path) == []


def test_rank_that_leaves_does_not_wait_for_a_store_to_take_the_manifest(ranks, corpus, tmp_path):
    """Rank 0 would be killed for that. What all ranks have written is whole once the store answers."""
    document = job(corpus, axes((1, 1, 2)), model={"layers": 1}, checkpoint={"every_steps": 0})
    first, second = ranks.run(ParallelConfig(data=2), leave_while_sealing, document, str(tmp_path))
    assert first == ("it was incomplete when its ranks disconnected", [[], [1]])
    assert second[0] is None


def test_save_that_its_rank_left_behind_prunes_nothing_and_does_not_count_as_sealed(trainer, monkeypatch):
    """Its ranks may have begun anew, and be saving what it would count as old."""
    asked, answers, seal, pruned = threading.Event(), threading.Event(), checkpointer.catalog.seal, []

    def slow_seal(*what):
        asked.set()
        assert answers.wait(60)
        seal(*what)

    monkeypatch.setattr(checkpointer.catalog, "seal", slow_seal)
    monkeypatch.setattr(checkpointer.pruning, "prune", lambda *what: pruned.append(what) or [])
    train(trainer, 2)
    checkpoints = trainer.state.checkpoints
    under_way = checkpoints._pending
    assert asked.wait(60)
    checkpoints._abandon_save()
    answers.set()
    assert under_way.result() is None and saved(trainer) == [2]
    assert (pruned, checkpoints._sealed) == ([], 0)


@pytest.fixture
def silent_store(monkeypatch) -> Iterator[threading.Event]:
    """Says which checkpoints there are only once it is set."""
    answers, look = threading.Event(), checkpointer.catalog.complete_checkpoints
    monkeypatch.setattr(checkpointer.catalog, "complete_checkpoints", lambda folder: answers.wait(60) and look(folder))
    yield answers
    answers.set()


def test_training_does_not_wait_while_a_silent_store_is_searched_for_checkpoints(trainer, silent_store, monkeypatch):
    """Each recovery would, and with it all ranks."""
    noted, checkpoints = noted_of(trainer, monkeypatch), trainer.state.checkpoints
    train(trainer, 1)
    trainer.state.save_missing_checkpoint()
    assert checkpoints._search is None, "nothing was due"
    monkeypatch.setattr(checkpoints, "due", lambda step: step in (2, 4, STEPS))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(checkpoints, "begin", lambda *given: None)
        train(trainer, 2)
    trainer.state.save_missing_checkpoint()
    train(trainer, 1)
    assert [kind for kind, _, _ in noted] == ["checkpoint_delayed"]
    assert noted[0][2].startswith("the checkpoint due at step 4 waits: existing checkpoints have been searched for ")
    silent_store.set()
    checkpoints.finish()
    train(trainer, 1)
    assert saved(trainer) == [5]
    train(trainer, 1)
    assert saved(trainer) == [5], "that was all"


def test_rank_that_waits_for_a_save_shows_progress_only_while_it_advances(trainer, store, monkeypatch):
    monkeypatch.setattr(checkpointer, "POLL_SECONDS", 0.02)
    checkpoints, progress = trainer.state.checkpoints, trainer.comm.progress
    looks, moves, seen, write = [], [], threading.Event(), SummingFile.write

    def moved(self: Any, waited: float = 0.0) -> None:
        moves.append(checkpoints.writing)
        seen.set()

    def look(*given: Any) -> Any:
        looks.append(None)
        if len(looks) == 4:
            moves.append("free")
            store.set()
        return wait(*given)

    def write_after_a_look(self: SummingFile, data: Any) -> int:
        assert checkpoints._writes == 0 or seen.wait(60)
        return write(self, data)

    monkeypatch.setattr(progress.__class__, "moved", moved)
    monkeypatch.setattr(checkpointer, "wait", look)
    monkeypatch.setattr(SummingFile, "write", write_after_a_look)
    checkpoints.start(2)
    checkpoints.finish()
    assert moves[0] == "free", "nothing was written before"
    assert len(moves) > 1 and all(moves)


@pytest.mark.parametrize(
    ("layout", "slow"),
    [
        *(((2, 1, 1), 1), ((1, 2, 2), 0)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (((2, 1, 1), 0), ((1, 2, 2), 3))),
    ],
)
def test_all_ranks_delay_the_same_saves_and_train_the_same_bits(ranks, corpus, tmp_path, layout, slow):
    document = job(corpus, axes(layout), train={"steps": STEPS}, checkpoint={"every_steps": 2, "keep": 9})
    parallel = ParallelConfig(**axes(layout))
    without = job(corpus, axes(layout), train={"steps": STEPS}, checkpoint={"every_steps": 0})
    undisturbed = ranks.run(parallel, train_and_save, without, str(tmp_path / "other"), STEPS)
    trained = ranks.run(parallel, train_beside_a_slow_save, document, str(tmp_path / "slow"), 5, slow)
    whole = complete_checkpoints(tmp_path / "slow")
    assert [manifest.step for _, manifest in whole] == [2, 6, STEPS]
    assert [step for kind, step in trained[0].events if kind == "checkpoint_delayed"] == [4]
    assert all(rank.held_up < 30 for rank in trained), "no step waits for the save"
    for rank, other in zip(trained, undisturbed, strict=True):
        for (name, offsets, values), (same, where, expected) in zip(rank.outcome.loaded, other.loaded, strict=True):
            assert (name, offsets) == (same, where) and torch.equal(values, expected)
    assert parse_job_spec(whole[-1][1].spec).train.steps == STEPS
