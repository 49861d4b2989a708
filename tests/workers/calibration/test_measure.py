"""Machines that are measured: CPUs and GPUs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from manta.service.planner.fitting import fit_gpu
from manta.service.planner.hardware import MACHINES
from manta.workers.calibration import __main__ as program
from manta.workers.calibration import clock, collectives, device
from manta.workers.calibration.__main__ import _with_disturbances, busy_ranks
from manta.workers.calibration.clock import median_seconds
from manta.workers.calibration.collectives import collective_times
from manta.workers.calibration.local_ranks import LocalRanks
from manta.workers.calibration.measurements import SMALL, BusyTime, Measurements, StepSeconds, step_job
from manta.workers.errors import MantaError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system.resources import OtherCpuLoad

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_measured_in_forward_and_backward(monkeypatch, dtype):
    monkeypatch.setattr(device, "ON_CPU", ((8, 16, 32),))
    rows = device.product_times(CPU, dtype)
    assert [row.name for row in rows] == ["forward", "input", "weight"]
    assert all(row.rate > 0 and f"torch.{row.precision}" == str(dtype) for row in rows)


def test_attention_is_measured(monkeypatch):
    monkeypatch.setattr(device, "HEADS_ON_CPU", ((1, 2, 16, 8),))
    (row,) = device.attention_times(CPU, torch.float32)
    assert (row.sequence, row.head_size) == (16, 8) and row.seconds > 0


def test_a_step_of_one_rank_is_measured(monkeypatch):
    monkeypatch.setattr(device, "STEPS_ON_CPU", ((1, 32, 2, 8, 1, 2, 64),))
    monkeypatch.setattr(device, "median_seconds", lambda run, device, _: median_seconds(run, device, 0.0))
    (row,) = device.step_times(CPU)
    assert step_job(row).micro_batches == 2 and row.seconds > 0


def test_median_seconds_on_a_cpu_ignore_time_spent_by_other_processes(monkeypatch):
    """By clocks that what is measured moves."""
    of_core, of_wall = [0.0], [0.0]
    clocks = SimpleNamespace(thread_time=lambda: of_core[0], perf_counter=lambda: of_wall[0])
    monkeypatch.setattr(clock, "time", clocks)

    def run():
        of_core[0] += 1.0
        of_wall[0] += 5.0

    assert median_seconds(run, CPU) == 1.0


def test_calibration_notes_the_spread_of_repetitions(monkeypatch):
    monkeypatch.setattr(clock, "spreads", [])
    assert clock._median([1.0, 1.0, 1.1, 1.2, 1.2]) == 1.1
    assert clock._median([1.0]) == 1.0
    assert clock.spreads == [pytest.approx(0.2 / 1.1)]


def test_calibration_keeps_busy_cores_and_spread_with_its_measurements(monkeypatch):
    monkeypatch.setattr(clock, "spreads", [0.01, 0.2, 0.02])
    others = OtherCpuLoad()
    monkeypatch.setattr(others, "cores", lambda: 0.5)
    measurements = _with_disturbances(Measurements("Abacus", 4), others)
    assert (measurements.other_cores, measurements.spread) == (0.5, 0.02)
    assert Measurements.from_json(dataclasses.asdict(measurements)) == measurements
    of_before = {
        name: value for name, value in dataclasses.asdict(measurements).items() if name not in ("other_cores", "spread")
    }
    assert Measurements.from_json(of_before).spread is None


@pytest.mark.parametrize(("cores", "ranks"), [(1, [1, 4]), (2, [1, 2, 8]), (6, [1, 6, 8]), (64, [1, 64])])
def test_calibration_rank_counts_include_one_and_enough_to_fill_all_cores(cores, ranks):
    """Eight ranks on 64 cores would say nothing of cores that all compute."""
    assert busy_ranks(cores) == ranks


@pytest.mark.parametrize("parallel", [{"data": 192}, {"tensor": 8}, {"pipeline": 16}])
def test_ranks_of_any_number_have_a_layout(parallel):
    """On a machine with 192 cores as many compute together."""
    assert parse_job_spec(device.layout_document(**parallel)).layout.world_size == next(iter(parallel.values()))


def test_collective_seconds_are_those_added_to_the_work_around_it(monkeypatch):
    """By a clock that both move; in one round of five something else ran too."""
    now, rounds = [0.0], iter([0.0, 0.0, 40.0, 0.0, 0.0])
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    disturbed: list[float] = []

    def spend(seconds: float) -> None:
        now[0] += seconds

    def collective() -> None:
        spend(3.0)
        if len(disturbed) % collectives.CPU_TIMES == 0:
            spend(next(rounds, 0.0))
        disturbed.append(now[0])

    comm = SimpleNamespace(barrier=lambda: spend(0.0))
    assert collectives._added_seconds(comm, lambda: spend(2.0), collective) == pytest.approx(3.0)


def test_busy_time_is_the_median_over_rounds_of_the_mean_over_ranks():
    first = [[1.0, 9.0, 1.0], [1.0, 1.0, 5.0]]
    second = [[], [3.0, 3.0, 5.0]]
    assert device.as_busy((1, 2), [first, second]) == [BusyTime(1, 1.0), BusyTime(2, 2.0)]


@pytest.mark.soak
def test_collectives_are_measured_between_processes():
    rows = LocalRanks().run(collective_times, device.layout_document(tensor=2))[0]
    assert {row.kind for row in rows} == {"all_gather", "reduce_scatter"} and {row.ranks for row in rows} == {2}


TINY = device.Shapes(
    products=((64, 64, 64), (256, 128, 512)),
    wide_products=((64, 64, 64),),
    attention=((2, 2, 64, 16), (1, 2, 128, 32)),
    elements=(2**12, 2**22),
    copied=2**16,
    steps=tuple(
        device.document_of((2, 32, 2, 16, 1, 2, 64), "bf16", family=family, kv_heads=1) for family in ("gpt", "llama")
    ),
)
SHAPES = dataclasses.replace(TINY, steps=TINY.steps[:1])


def test_gpu_calibration_has_every_kind_of_row(monkeypatch):
    monkeypatch.setattr(device, "median_seconds", lambda run, device, _=0.0: median_seconds(run, device, 0.0))
    said: list[str] = []
    measurements = device.measure_gpu(CPU, SHAPES, said.append)
    assert {row.precision for row in measurements.products} == {"bfloat16", "float32", "tf32"}
    assert {row.name for row in measurements.products} == {"forward", "input", "weight"}
    assert all(row.forward_seconds is not None for row in measurements.attention)
    assert {"sum", "update", "layer_norm"} < {row.name for row in measurements.elements}
    assert [row.direction for row in measurements.copies] == ["to_device", "to_host"]
    assert all(
        row.seconds > 0 for rows in (measurements.products, measurements.elements, measurements.copies) for row in rows
    )
    assert said == ["matrix products and attention", "memory and copies", "steps of one rank"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert measurements.gpu_memory_bytes is not None
    assert all(
        value > 0 for name, value in vars(fit_gpu(measurements, MACHINES["h100-80gb"])).items() if name != "adds_wider"
    )


def test_calibration_jobs_of_a_gpu_are_small():
    for document in device.ON_GPU.steps:
        spec = step_job(StepSeconds(document, 1.0))
        assert spec.layout.world_size == 1 and spec.train.global_batch_size * spec.model.sequence_length <= 2**15
    assert sum(document["model"]["hidden_size"] <= SMALL for document in device.ON_GPU.steps) == 3


@pytest.mark.parametrize(
    ("kind", "there", "measured"), [("auto", True, True), ("auto", False, False), ("cpu", True, False)]
)
def test_calibration_measures_the_gpu_if_there_is_one_unless_cpu_is_asked_for(monkeypatch, kind, there, measured):
    class Chosen(Exception):
        pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(program, "measure_gpu", Mock(side_effect=Chosen))
    monkeypatch.setattr(program, "product_times", lambda *_: (_ for _ in ()).throw(LookupError))
    with pytest.raises(Chosen if measured else LookupError):
        program.measure(kind, print)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`.\n"), "CUDA error: out of memory"),
        (MantaError("no GPU is there"), "no GPU is there"),
    ],
)
def test_calibration_failure_ends_with_its_error_message(monkeypatch, capsys, error, said):
    monkeypatch.setattr(program, "measure", Mock(side_effect=error))
    assert program.main([]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == said
