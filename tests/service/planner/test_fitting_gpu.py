"""A GPU's constants come out of rows that were made with them, and plans for it go by them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from manta.service.planner.fitting import fit_gpu, machine_measured, product_time, step_seconds
from manta.service.planner.hardware import HOPPER, MACHINES, Gpu, UnknownMachine, measured, named_by_driver
from manta.service.planner.operations import attention_seconds, product_seconds
from manta.workers.calibration.device import ON_GPU
from manta.workers.calibration.measurements import (
    AttentionTime,
    CopyTime,
    ElementTime,
    Measurements,
    ProductTime,
    StepSeconds,
)
from manta.workers.calibration.steps import document_of

ASSUMED = MACHINES["h100-80gb"]
GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)


def rows(gpu: Gpu) -> Measurements:
    """Rows as such a GPU would give them."""
    machine = measured(ASSUMED, gpu)
    measurements = Measurements(
        "NVIDIA H100 80GB HBM3", 16, gpu_memory_bytes=int(79.2 * 2**30), adds_wider=gpu.adds_wider
    )
    for precision, shapes in (("bfloat16", ON_GPU.products), ("float32", ON_GPU.wide_products)):
        for n, i, o in shapes:
            for name in ("forward", "input", "weight"):
                row = ProductTime(name, precision, n, i, o, 1.0)
                measurements.products.append(replace(row, seconds=product_time(row, machine)))
    for b, a, s, d in ON_GPU.attention:
        forward, backward = attention_seconds(machine, b * a, s, d)
        measurements.attention.append(AttentionTime(b, a, s, d, forward + backward, forward))
    for name in ("sum", "gelu", "square"):
        measurements.elements.append(ElementTime(name, 2**16, gpu.kernel_seconds))
        measurements.elements.append(ElementTime(name, 2**30, gpu.kernel_seconds + 2**30 / gpu.memory))
        measurements.elements.append(ElementTime(name, 2**24, 2**24 / gpu.memory / 3))  # in a cache
    measurements.elements.extend(ElementTime("update", moved, moved / gpu.update) for moved in (2**16, 2**29))
    measurements.copies.extend(
        [CopyTime("to_device", 2**28, 2**28 / gpu.copy), CopyTime("to_host", 2**28, 0.9 * 2**28 / gpu.copy)]
    )
    for family in ("gpt", "llama", "qwen"):
        row = StepSeconds(document_of((8, 128, 2, 128, 1, 4, 1024), "bf16", family=family), 1.0)
        measurements.steps.append(replace(row, seconds=step_seconds(row, machine)))
    return measurements


@pytest.mark.parametrize("adds_wider", [False, True])
def test_fit_of_a_gpu_recovers_the_constants_its_rows_were_made_with(adds_wider):
    gpu = replace(GPU, adds_wider=adds_wider)
    assert asdict(fit_gpu(rows(gpu), ASSUMED)) == pytest.approx(asdict(gpu), rel=0.03)


@pytest.mark.parametrize("name", [name for name in asdict(GPU) if name != "adds_wider"])
def test_fit_of_a_gpu_follows_a_change_of_each_constant(name):
    changed = replace(GPU, **{name: 1.3 * getattr(GPU, name)})
    assert asdict(fit_gpu(rows(changed), ASSUMED)) == pytest.approx(asdict(changed), rel=0.03)


def test_gpu_measurements_survive_json():
    measurements = rows(GPU)
    assert Measurements.from_json(asdict(measurements)) == measurements


@pytest.mark.parametrize(
    ("device", "gibibytes", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H200", 140.0, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("NVIDIA L40S", 44.5, "l40s-48gb"),
        ("NVIDIA B200", 178.0, "b200-180gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-80gb"),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, None),
    ],
)
def test_gpu_name_of_the_driver_maps_to_a_known_accelerator(device, gibibytes, name):
    assert named_by_driver(device, gibibytes * 2**30) == name


def test_fit_of_an_unknown_gpu_is_refused_by_name():
    with pytest.raises(UnknownMachine, match=r"\(Abacus\); known are v100-32gb"):
        machine_measured(Measurements("Abacus", 1, gpu_memory_bytes=1))


def test_machine_with_a_measured_gpu_still_has_assumed_links():
    machine = measured(ASSUMED, GPU)
    assert ASSUMED.is_assumed and not ASSUMED.links_are_assumed and ASSUMED.constants == HOPPER
    assert not machine.is_assumed and machine.links_are_assumed
    assert machine.constants.inside == HOPPER.inside
    assert not measured(MACHINES["a100-80gb"], GPU).links_are_assumed


def test_products_with_few_tiles_and_long_sums_are_split_along_the_sum():
    machine = measured(ASSUMED, GPU)
    one_wave = 2 * 64 * 64 * 16384 / (GPU.product_16bit / 132 * 0.55)
    assert product_seconds(machine, 512, 512, 16384) < 0.6 * one_wave
    assert product_seconds(machine, 512, 512, 256) > GPU.kernel_seconds


def test_planned_attention_of_few_heads_is_less_efficient():
    machine = measured(ASSUMED, replace(GPU, kernel_seconds=1e-12))
    one, many = attention_seconds(machine, 1, 2048, 128)[0], attention_seconds(machine, 64, 2048, 128)[0]
    assert one > many / 32
    forward, backward = attention_seconds(machine, 128, 2048, 128)
    assert forward == pytest.approx(2 * many)
    # Half of the scores and those on the diagonal, two products forward and five backward.
    assert forward * GPU.attention == pytest.approx(4 * 128 * 2048 * (2048 + 128) / 2 * (128 + 64))
    assert backward / forward == pytest.approx(5 / 2 / 0.74)
