"""A row of metrics says of its step what the figures mean, where its batch is smaller than the last ones too."""

from __future__ import annotations

import psutil
import pytest
import torch
from engine_specs import layout_of, spec

from manta.workers.accounting.flops import step_flops
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.data.batch_plan import BatchPlan
from manta.workers.liveness.progress import Progress
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.timing.step_phases import StepPhases
from manta.workers.training.step_row import StepRows, mean_part_seconds, memory_in_use

CPU = torch.device("cpu")


def test_a_row_counts_the_tokens_and_the_work_of_its_own_step():
    """The third step of a ramp: 4, 4, 6, then 8 sequences of 8 tokens."""
    job = spec(
        model={"kv_heads": 1},
        train={"batch_ramp": {"start": 4, "increment": 2, "samples": 12}},
        parallel={"tensor": 2, "recompute": "full"},
    )
    flops = step_flops(job, sequences=6)
    kinds = (flops.model_full, flops.model_causal, flops.hardware_full, flops.hardware_paper)
    assert len(set(kinds)) == 4, "no figure can stand in for another"
    rows = StepRows(job, BatchPlan(job.train), peak_flops=1e9)
    row = rows.row(3, StepStatistics(loss=2.5, grad_norm=0.5, memory_bytes=77), learning_rate=1e-3, seconds=0.5)
    assert row == {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": (4 + 4 + 6) * 8,
        "tokens_per_second": 6 * 8 / 0.5,
        "step_seconds": 0.5,
        "mfu_full": flops.model_full / 0.5e9,
        "mfu_causal": flops.model_causal / 0.5e9,
        "hfu_full": flops.hardware_full / 0.5e9,
        "hfu_paper": flops.hardware_paper / 0.5e9,
        "memory_bytes": 77,
    }


def test_step_row_has_a_z_loss_only_if_there_is_one():
    job = spec(train={"z_loss": 1e-4})
    rows = StepRows(job, BatchPlan(job.train), peak_flops=1e9)
    with_it = rows.row(1, StepStatistics(2.5, 0.5, 77, z_loss=0.003), learning_rate=1e-3, seconds=0.5)
    without = rows.row(1, StepStatistics(2.5, 0.5, 77), learning_rate=1e-3, seconds=0.5)
    assert with_it == without | {"z_loss": 0.003}


def test_step_row_has_no_utilisation_for_a_model_of_unknown_flops():
    job = spec(model={"family": "custom", "entrypoint": "theirs:build"})
    row = StepRows(job, BatchPlan(job.train), peak_flops=1e9).row(1, StepStatistics(2.5, 0.5, 77), 1e-3, seconds=0.5)
    assert not [name for name in row if name.startswith(("mfu", "hfu"))]
    assert row["loss"] == 2.5


def test_the_time_of_the_parts_is_their_mean_over_ranks(monkeypatch):
    """The other rank has spent one second more on each part."""
    now = [0.0]
    comm = Comm(RankGrid(layout_of(data=2)), 0, CPU)
    comm.step = StepPhases(CPU, Progress(), lambda: now[0])
    monkeypatch.setattr(comm, "all_reduce", lambda axis, values: values.mul_(2.0).add_(1.0))
    comm.step.begin(1, measure=True)
    with comm.step.phase("forward"):
        now[0] += 4.0
    means = mean_part_seconds(comm, snapshot_seconds=2.0)
    assert (means["forward_seconds"], means["snapshot_seconds"], means["bubble_seconds"]) == (4.5, 2.5, 0.5)
    assert not comm.step.parts.measuring, "the measurement is over"


def test_cpu_memory_in_use_is_resident_memory():
    assert memory_in_use(CPU) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
