"""What snapshots and checkpoints take is known before a job runs, and how many steps lie between two of them."""

from __future__ import annotations

import math

import pytest
import torch
from engine_specs import spec
from hypothesis import assume, given
from hypothesis import strategies as st

from manta.workers.accounting.state_costs import (
    FREE_SECONDS,
    SLOTS,
    STALL_SHARE,
    checkpoint_bytes,
    frozen_bytes,
    snapshot_bytes,
    steps_between,
)
from manta.workers.checkpoint.catalog import list_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import snapshot_files
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter


@pytest.mark.parametrize("frozen", [[], ["embedding", "layers.0-2"]], ids=["all trained", "most frozen"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_snapshot_and_checkpoint_bytes_match_the_written_files(tmp_path, monkeypatch, precision, frozen):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40, encoding="utf-8")
    job = spec(train={"steps": 2, "precision": precision, "frozen": frozen}, checkpoint={"every_steps": 2})
    places = StatePaths(snapshots=str(tmp_path / "shared"), checkpoints=str(tmp_path / "durable"))
    trainer = Trainer(job, Comm(RankGrid(job.layout), 0, torch.device("cpu")), Reporter(lambda _: None), 1e9, places)
    trainer.restore(Resume())
    trainer.train()
    trainer.close()
    (file,) = snapshot_files(tmp_path / "shared")
    assert 0 <= file.path.stat().st_size - snapshot_bytes(job) <= SLOTS * 1024 * 1024
    (saved,) = list_checkpoints(tmp_path / "durable").complete
    assert checkpoint_bytes(job) <= saved[1].bytes <= 2 * checkpoint_bytes(job) + 200_000
    apart = saved[1].all_bytes - saved[1].bytes
    assert frozen_bytes(job) <= apart <= 2 * frozen_bytes(job) + 100_000 * bool(frozen)


def test_replicas_share_the_state_with_zero_and_have_copies_without():
    alone, four, copies = (spec(parallel=layout) for layout in ({}, {"data": 4, "zero": 1}, {"data": 4, "zero": 0}))
    assert snapshot_bytes(four) == snapshot_bytes(alone) == snapshot_bytes(copies) / 4
    assert checkpoint_bytes(four) == checkpoint_bytes(copies) == snapshot_bytes(alone) / 2
    assert snapshot_bytes(spec(checkpoint={"snapshots": "off"})) == 0


def test_checkpoint_bytes_count_replicated_tensors_once():
    """A tied embedding is on two stages, and what is not cut on all tensor ranks."""
    sizes = {
        checkpoint_bytes(spec(parallel=layout)) for layout in ({}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 4})
    }
    assert len(sizes) == 1
    assert snapshot_bytes(spec(parallel={"pipeline": 2})) > snapshot_bytes(spec())


seconds = st.floats(1e-6, 1e3)


@given(seconds, seconds)
def test_the_fewest_steps_that_keep_the_stalls_to_their_share(stall, step):
    every = steps_between(stall, step)
    assert every >= 1
    if stall > FREE_SECONDS:
        assert stall / every <= STALL_SHARE * step * (1 + 1e-9)
    if every > 1:
        assert stall > FREE_SECONDS
        assert stall / (every - 1) > STALL_SHARE * step * (1 - 1e-9)


@given(seconds, seconds, seconds)
def test_a_longer_stall_never_means_more_snapshots(stall, more, step):
    assume(math.isfinite(stall + more))
    assert steps_between(stall + more, step) >= steps_between(stall, step)
