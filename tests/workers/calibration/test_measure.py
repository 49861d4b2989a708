"""What is measured is there for every shape, and what is fitted on it is a core. Says nothing about times."""

from __future__ import annotations

import pytest
import torch

from workers.calibration import kernels, steps
from workers.calibration.clock import median_seconds
from workers.calibration.links import collective_times
from workers.calibration.local_ranks import LocalRanks
from workers.calibration.measurements import step_job

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_measured_forward_and_back(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "ON_CPU", ((8, 16, 32),))
    rows = kernels.product_times(CPU, dtype)
    assert [row.name for row in rows] == ["forward", "input", "weight"]
    assert all(row.rate > 0 and f"torch.{row.precision}" == str(dtype) for row in rows)


def test_attention_is_measured(monkeypatch):
    monkeypatch.setattr(kernels, "HEADS_ON_CPU", ((1, 2, 16, 8),))
    (row,) = kernels.attention_times(CPU, torch.float32)
    assert (row.sequence, row.head_size) == (16, 8) and row.seconds > 0


def test_a_step_of_one_rank_is_measured(monkeypatch):
    monkeypatch.setattr(steps, "ON_CPU", ((1, 32, 2, 8, 1, 2, 64),))
    monkeypatch.setattr(steps, "median_seconds", lambda run, device, _: median_seconds(run, device, 0.0))
    (row,) = steps.step_times(CPU)
    assert step_job(row).micro_batches == 2 and row.seconds > 0


@pytest.mark.soak
def test_collectives_are_measured_between_processes():
    document = steps.document_of(steps.BUSY, "fp32") | {"parallel": {"tensor": 2}}
    rows = LocalRanks().run(collective_times, document)[0]
    assert {row.kind for row in rows} == {"all_gather", "reduce_scatter"} and {row.ranks for row in rows} == {2}
