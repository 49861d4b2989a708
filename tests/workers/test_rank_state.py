"""What a rank keeps of its state outlives a change of generation exactly as far as it is still true."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from engine_specs import spec
from reported import events_of, rows_of

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.checkpoint.checksums import SummingFile
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid, state_peers
from manta.workers.errors import CheckpointNotSaved
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import snapshot_path, stored_steps
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.note import read_note
from manta.workers.snapshot.snapshot_file import SnapshotFile
from manta.workers.snapshot.snapshots import Snapshots
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training import rank_state
from manta.workers.training.rank_state import NO_PATHS, RankState
from manta.workers.training.reporter import Reporter


class Rank:
    """A process of a job of one rank, which keeps its state below a folder."""

    def __init__(self, folder: Path, recovery: dict[str, int | str] | None = None, **checkpoint: int | str):
        corpus = folder / "corpus.txt"
        corpus.write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
        self.folder, self._messages = folder, []
        job = spec(
            data={"paths": [str(corpus)]}, train={"steps": 5}, model={"layers": 1}, checkpoint=checkpoint,
            recovery=recovery or {},
        )  # fmt: skip
        comm = Comm(RankGrid(job.layout), 0, torch.device("cpu"))
        places = StatePaths(snapshots=str(folder / "shared"), checkpoints=str(folder / "durable"))
        self.trainer = Trainer(job, comm, Reporter(self._messages.extend), 1e9, places)

    @property
    def snapshots(self) -> list[int]:
        """Steps of which there is a whole snapshot."""
        return stored_steps(self.folder / "shared", 0)

    def train(self, steps: int) -> None:
        """So many steps, the snapshot of the last one included."""
        for _ in range(steps):
            self.trainer.train_step()
        self.trainer.state.snapshots.finish()

    def end(self) -> list[int]:
        """End, and say of which steps there were rows."""
        self.trainer.close()
        self.trainer.reporter.close()
        return [row["step"] for row in rows_of(self._messages)]


def test_rank_that_is_a_step_ahead_returns_to_the_common_step(tmp_path):
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.train(1)
    common = [each.clone() for each in rank.trainer.engine.state()]
    rank.train(1)
    rank.trainer.restore(Resume("snapshot", 1))
    assert rank.trainer.step == 1
    assert all(torch.equal(now, then) for now, then in zip(rank.trainer.engine.state(), common, strict=True))
    rank.end()


def test_snapshots_in_memory_that_is_not_pinned_are_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(Snapshots, "pin_error", 2)
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.end()
    (event,) = events_of(rank._messages)
    assert (event["type"], event["ranks"]) == ("snapshots_not_pinned", 1)
    assert "of 1 of 1 ranks: each takes much longer" in event["message"]


@pytest.mark.parametrize("source", ["start", "checkpoint"])
@pytest.mark.parametrize("lives_on", [True, False])
def test_snapshots_of_steps_that_were_given_up_are_forgotten(tmp_path, source, lives_on):
    """Another rank would go on from them, though the state that they belong to did not come about."""
    rank = Rank(tmp_path, every_steps=2)
    rank.trainer.restore(Resume())
    for _ in range(3):
        rank.train(1)
        rank.trainer.state.checkpoints.finish()
    assert rank.snapshots == [2, 3]
    ((path, _),) = complete_checkpoints(tmp_path / "durable")
    if not lives_on:
        rank.end()
        rank = Rank(tmp_path, every_steps=2)
    resume = Resume() if source == "start" else Resume("checkpoint", 2, str(path))
    rank.trainer.restore(resume)
    assert rank.snapshots == [resume.step]
    rank.end()


def test_rows_of_abandoned_steps_are_not_reported_again(tmp_path):
    """The process begins anew; the one after it reports again what lies in its snapshot."""
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.train(3)
    rank.trainer.restore(Resume())
    rank.train(1)
    assert rank.end() == [1, 2, 3, 1]
    successor = Rank(tmp_path)
    successor.trainer.restore(Resume("snapshot", 1))
    assert successor.end() == [1]


def test_rows_of_rolled_back_steps_are_not_reported_again(tmp_path):
    recovery = {"nonfinite": "roll_back", "roll_back_steps": 2}
    rank = Rank(tmp_path, recovery)
    rank.trainer.restore(Resume())
    rank.train(3)
    rank.trainer.engine.flat.parameters.fill_(float("inf"))
    rank.train(1)
    back_to = rank.trainer.step
    assert back_to < 3 and rank.end() == [1, 2, 3]
    successor = Rank(tmp_path, recovery)
    successor.trainer.restore(Resume("snapshot", back_to))
    assert successor.end() == list(range(1, back_to + 1))


def test_snapshot_memory_of_another_layout_is_given_back_to_the_node_daemon(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(SnapshotMemory, "free_unlinked", lambda memory: asked.append(memory.place))
    for with_daemon in (False, True):
        monkeypatch.setattr(rank_state, "remove_other_layouts", lambda *_, there=with_daemon: there)
        (tmp_path / str(with_daemon)).mkdir()
        rank = Rank(tmp_path / str(with_daemon))
        rank.trainer.restore(Resume())
        rank.end()
        assert len(asked) == with_daemon


def test_rank_coming_to_rest_takes_a_snapshot_even_if_none_is_due(tmp_path):
    """From which ranks of another layout can go on."""
    rank = Rank(tmp_path, snapshot_every_steps=4)
    rank.trainer.restore(Resume())
    rank.train(2)
    assert rank.snapshots == [0]
    rank.trainer.rest()
    assert rank.snapshots == [0, 2]
    rank.end()


def test_a_generation_begins_with_a_snapshot_of_every_step(tmp_path):
    """A new process among those that live on knows nothing of how long snapshots took, and all must keep the same."""
    rank = Rank(tmp_path, snapshot_every_steps="auto")
    rank.trainer.restore(Resume())
    rank.trainer.state.interval.every = 3
    rank.train(1)
    assert rank.snapshots == [0]
    rank.trainer.rest()
    rank.trainer.restore(Resume("snapshot", 1))
    rank.train(1)
    assert rank.snapshots == [1, 2]
    rank.end()


def test_earlier_failed_save_does_not_fail_a_job_whose_last_checkpoint_is_whole(tmp_path):
    """A rank that loses its peers while they save the last step learns no more that the others got through."""
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.trainer.train()
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path / "durable")] == [5]
    rank.trainer.state.checkpoints.failure = "rank 1 is gone"
    rank.trainer.restore(Resume("snapshot", 5))
    rank.trainer.train()
    rank.end()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_job_whose_last_checkpoint_cannot_be_saved_fails_and_says_so(tmp_path):
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    reason = "the last checkpoint, of step 5, could not be saved: .*No space left on device"
    with patch.object(SummingFile, "write", full), pytest.raises(CheckpointNotSaved, match=reason):
        rank.trainer.train()
    rank.trainer.restore(Resume("snapshot", 5))
    rank.trainer.train()
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path / "durable")] == [5]
    rank.end()


def test_stand_in_for_rank_0_keeps_its_rows_and_reports_none(tmp_path):
    rank = Rank(tmp_path)
    state = rank.trainer.state
    rank.trainer.restore(Resume())
    state.comm.rank = 1
    rank.train(1)
    state._resend_rows([{"step": 0}])
    rows, _ = read_note(state._note())
    assert [(row["step"], row.get("rank")) for row in rows] == [(1, 1), (0, None)]
    state._retains_rows = False
    state.keep(2, lambda: pytest.fail("nobody needs the row"))
    state.snapshots.finish()
    state._resend_rows([{"step": 9}])
    assert len(read_note(state._note())[0]) == 2
    assert rank.snapshots == [1, 2]
    assert rank.end() == []


def test_ranks_with_the_state_of_rank_0_keep_its_rows():
    job = spec(parallel={"tensor": 1, "pipeline": 2, "data": 2, "zero": 0})
    keep = []
    for rank in range(4):
        comm = Comm(RankGrid(job.layout), rank, torch.device("cpu"))
        state = RankState(job, SimpleNamespace(), comm, Reporter(lambda messages: None), NO_PATHS)
        keep.append(state._retains_rows)
    assert keep == [rank in state_peers(job.layout, 0) for rank in range(4)]
    assert keep.count(True) == 2


def test_compared_weights_are_those_of_the_last_snapshot(tmp_path):
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.train(1)
    kept, own = rank.trainer.state.snapshot_parameters(), rank.trainer.engine.optimizer.parameters
    assert len(kept) == len(own)
    assert all(torch.equal(a, b) for a, b in zip(kept, own, strict=True))
    rank.trainer.state.snapshots.clear()
    assert rank.trainer.state.snapshot_parameters() is None
    rank.end()


def test_resting_rank_has_snapshot_sums_and_no_save_in_progress(tmp_path):
    rank = Rank(tmp_path, every_steps=1)
    rank.trainer.restore(Resume())
    rank.trainer.train_step()
    snapshots = rank.trainer.state.snapshots
    with patch.object(snapshots, "wait_for_sums", wraps=snapshots.wait_for_sums) as waits:
        rank.trainer.rest()
    waits.assert_called_once_with()
    assert rank.trainer.state.checkpoints._pending is None
    (path,) = (tmp_path / "shared").glob("*.snapshot")
    file = SnapshotFile.open(path)
    assert file.sealed_sums(file.slot_of(1)) is not None
    file.close()
    rank.end()


def test_snapshot_interval_counts_only_steps_with_a_snapshot(tmp_path):
    rank = Rank(tmp_path, snapshot_every_steps=2)
    rank.trainer.restore(Resume())
    for _ in range(4):
        rank.trainer.train_step()
    assert len(rank.trainer.state.interval._stalls) == 1, "of step 2, before the update of step 3"
    assert len(rank.trainer.state.interval._steps) == 4
    rank.end()


def test_state_belongs_to_no_step_while_it_changes(tmp_path):
    rank = Rank(tmp_path)
    assert rank.trainer.settled_step is None, "before it was restored"
    rank.trainer.restore(Resume())
    assert rank.trainer.settled_step == 0
    rank.train(1)
    assert rank.trainer.settled_step == 1
    with pytest.raises(ValueError, match="cannot resume from"):
        rank.trainer.restore(Resume("checkpoint", 1))
    assert rank.trainer.settled_step is None, "nobody goes on from what was begun"
    rank.end()


def test_snapshot_file_of_another_layout_is_removed_once_a_generation_begins(tmp_path):
    (tmp_path / "shared").mkdir()
    other = snapshot_path(tmp_path / "shared", 0, "ffffffff")
    other.write_bytes(b"")
    rank = Rank(tmp_path)
    assert other.exists(), "somebody may still read it"
    rank.trainer.restore(Resume())
    assert not other.exists()
    rank.end()


def test_a_rank_that_has_the_step_already_reads_nothing_and_keeps_its_rows(tmp_path):
    """Rank 0 may die soon after, and its successor knows what lies in its snapshot."""
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.train(2)
    with patch.object(rank.trainer.state.snapshots, "load", side_effect=AssertionError("its state is there")):
        rank.trainer.restore(Resume("snapshot", 2))
    rank.train(1)
    assert rank.end() == [1, 2, 3]
    successor = Rank(tmp_path)
    successor.trainer.restore(Resume("snapshot", 3))
    assert successor.end() == [1, 2, 3]


def test_interrupted_step_measurement_ends_with_the_next_generation(tmp_path):
    rank = Rank(tmp_path)
    rank.trainer.restore(Resume())
    rank.trainer.comm.step.begin(10, measure=True)
    rank.trainer.restore(Resume())
    assert not rank.trainer.comm.step.parts.measuring
    rank.end()


def test_steps_undone_by_a_roll_back_are_forgotten_after_all_ranks_saved(tmp_path, monkeypatch, each_save_at_its_step):
    """Whatever dies in between, all of them have a step in common."""
    rank = Rank(tmp_path, {"nonfinite": "roll_back", "roll_back_steps": 2}, every_steps=1)
    rank.trainer.restore(Resume())
    rank.train(3)
    done, state = [], rank.trainer.state
    for owner, name in (
        (state.snapshots, "save"), (state.snapshots, "forget_after"), (state.checkpoints, "finish"),
        (state.checkpoints, "undo_after"), (state.comm, "barrier"),
    ):  # fmt: skip
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, name=name, real=real: (done.append((name, *given)), real(*given))
        )
    rank.trainer.engine.flat.parameters.fill_(float("inf"))
    rank.trainer.train_step()
    back_to = rank.trainer.step
    (_, saved, _), *others = done
    assert (done[0][0], saved) == ("save", back_to)
    assert others == [("finish",), ("barrier",), ("forget_after", back_to), ("undo_after", back_to)]
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path / "durable")] == list(range(1, back_to + 1))
    rank.end()


def test_a_row_says_by_which_generation_its_step_was_committed(tmp_path):
    rank = Rank(tmp_path)
    rank.trainer.comm.generation = 7
    rank.trainer.restore(Resume())
    rank.train(1)
    assert rank.end() == [1]
    assert [row["generation"] for row in rows_of(rank._messages)] == [7]


@pytest.mark.parametrize("recovery", [{}, {"nonfinite": "roll_back"}])
def test_closed_rank_state_leaves_no_thread_running(tmp_path, recovery):
    before = set(threading.enumerate())
    rank = Rank(tmp_path, recovery, every_steps=1)
    rank.trainer.restore(Resume())
    rank.train(1)
    rank.end()
    assert set(threading.enumerate()) <= before
