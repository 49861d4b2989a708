"""Machines are found by the names that people use, and have no more constants than allowed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from manta.service.planner.hardware import HOPPER, MACHINES, Constants, Gpu, Links, UnknownMachine, machine_of, measured


def test_machine_model_has_at_most_eight_constants():
    assert len(fields(Constants)) <= 8


@pytest.mark.parametrize(
    ("name", "known"),
    [("a100-80gb", "a100-80gb"), ("A100", "a100-80gb"), ("v100", "v100-32gb")],
)
def test_accelerator_name_without_memory_means_the_larger_variant(name, known):
    assert machine_of(name) is MACHINES[known]


def test_unknown_accelerator_is_refused_with_the_known_ones():
    with pytest.raises(UnknownMachine, match="unknown accelerator 'a1000'; known are v100-32gb"):
        machine_of("a1000")


@pytest.mark.parametrize("name", MACHINES)
def test_machine_constants_have_plausible_units(name):
    machine = MACHINES[name]
    device, constants = machine.accelerator, machine.constants
    assert 1e13 < device.peak_16bit < 1e16 and 1e12 < device.peak_fp32 < device.peak_16bit
    assert 1e10 < device.memory_bytes < 1e12 and 5e11 < device.memory_bandwidth < 1e13
    assert 1e10 <= device.link_bandwidth <= 1e12 and 1e9 < machine.adapter_bandwidth < 1e12
    for part in ("product", "memory", "inside", "message", "collective"):
        assert 0 < getattr(constants, part) <= 1


def test_measured_gpu_constants_replace_assumed_ones():
    machine = machine_of("h100")
    gpu = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    known = measured(machine, gpu)
    reached = known.constants
    assert reached.product * machine.accelerator.peak_16bit == pytest.approx(6.8e14)
    assert reached.memory * machine.accelerator.memory_bandwidth == pytest.approx(2.7e12)
    assert (reached.host_seconds, known.gpu, known.is_assumed, known.links_are_assumed) == (7e-6, gpu, False, True)
    assert (reached.inside, known.hop_seconds) == (HOPPER.inside, machine.hop_seconds)


def test_measured_gpu_links_replace_assumed_ones():
    machine, gpu = machine_of("h100"), Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    known = measured(machine, gpu, Links(3.6e11, 5e-6))
    assert (known.constants.inside, known.hop_seconds) == (pytest.approx(3.6e11 / 450e9), 5e-6)
    assert known.links_are_assumed, "between nodes, and how long ranks wait"
    assert known.constants.skew_seconds == HOPPER.skew_seconds
    fitted = machine_of("a100")
    assert not measured(fitted, gpu, Links(2e11, 5e-6)).links_are_assumed
