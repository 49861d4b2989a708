"""What is measured on a GPU, rehearsed on a CPU: every kind of row is there, and a GPU comes out of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from manta.service.planner.fitting import fit_gpu
from manta.service.planner.hardware import MACHINES
from manta.workers.calibration import __main__ as program
from manta.workers.calibration import device, steps
from manta.workers.calibration.clock import median_seconds
from manta.workers.calibration.measurements import SMALL, Measurements, StepSeconds, step_job
from manta.workers.errors import MantaError

CPU = torch.device("cpu")
TINY = device.Shapes(
    products=((64, 64, 64), (256, 128, 512)),
    wide_products=((64, 64, 64),),
    attention=((2, 2, 64, 16), (1, 2, 128, 32)),
    elements=(2**12, 2**22),
    copied=2**16,
    steps=tuple(
        steps.document_of((2, 32, 2, 16, 1, 2, 64), "bf16", family=family, kv_heads=1) for family in ("gpt", "llama")
    ),
)
SHAPES = dataclasses.replace(TINY, steps=TINY.steps[:1])


def test_gpu_calibration_has_every_kind_of_row(monkeypatch):
    for module in (device, steps):
        monkeypatch.setattr(module, "median_seconds", lambda run, device, _=0.0: median_seconds(run, device, 0.0))
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

    def stop(*_: object) -> Measurements:
        raise Chosen

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(program, "measure_gpu", stop)
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
    def fails(*_: object) -> Measurements:
        raise error

    monkeypatch.setattr(program, "measure", fails)
    assert program.main([]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == said
