"""Peak rates: known GPUs by name, a CPU by measurement."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch
from engine_specs import spec

from manta.workers.accounting import device_peak
from manta.workers.accounting.device_peak import measure_peak_flops, peak_of_rank
from manta.workers.accounting.device_table import DEVICE_PEAKS, known_peak, peak_of_stages
from manta.workers.protocol.messages import PeakRate


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
    ],
)
def test_peak_flops_of_known_devices_come_from_the_table(name, bf16, fp32):
    assert known_peak(name) == bf16
    assert known_peak(name, "fp32") == fp32


def test_fp8_peak_is_twice_the_16_bit_one_or_unknown():
    assert known_peak("NVIDIA H100 80GB HBM3", "fp8") == 1978.8e12
    assert known_peak("NVIDIA L4", "fp8") == 242e12
    assert known_peak("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_peak_flops_of_a_device_are_not_those_of_one_with_a_shorter_name():
    assert [known_peak(f"NVIDIA {device.name.upper()}") for device in DEVICE_PEAKS] == [
        device.bf16 for device in DEVICE_PEAKS
    ]


@pytest.mark.parametrize("name", ["Riva 128", "NVIDIA RTX A4000", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA T400 4GB"])
def test_unknown_device_has_no_peak(name):
    assert known_peak(name) is None


def test_peak_flops_of_a_cpu_are_measured():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert device_peak.run({"device": "cpu"}, theirs) == 0
        answer = json.loads(ours.makefile().readline())
    assert answer["source"] == "measured"
    assert 1e8 < answer["peak_flops"] < 1e13


def test_the_peak_of_a_rank_is_that_of_its_threads_at_the_jobs_precision(monkeypatch):
    rates = {"fp32": 1e9, "bf16": 4e9}
    monkeypatch.setattr(device_peak, "measure_peak_flops", lambda _, precision: PeakRate(rates[precision], "measured"))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    job = spec(resources={"threads": 3})
    assert (peak_of_rank(cpu, job), peak_of_rank(cuda, job)) == (3e9, 1e9)
    assert peak_of_rank(cuda, spec(train={"precision": "bf16"})) == 4e9
    assert peak_of_rank(cpu, job, of_thread=2e9) == 6e9


def test_measured_peak_counts_two_operations_a_product_in_the_best_time(monkeypatch):
    times = iter([0.0, 0.0, 1.0, 5.0, device_peak.MEASURE_SECONDS / 2, 2.0, 2.5, 9.0])
    monkeypatch.setattr(device_peak, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert device_peak._best_product_rate("cpu", torch.float32, 4) == 2 * 4**3 / 0.5


def test_device_peak_is_measured_only_for_unlisted_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device])
    monkeypatch.setattr(device_peak, "_best_product_rate", lambda *arguments: measured.append(arguments) or 5e12)
    names, measured = {"cuda:1": "NVIDIA H100 80GB HBM3", "cuda": "Riva 128"}, []
    assert measure_peak_flops("cuda:1") == PeakRate(989.4e12, "table")
    assert measure_peak_flops("cuda:1", "fp32") == PeakRate(66.9e12, "table")
    assert not measured
    assert measure_peak_flops("cuda") == PeakRate(5e12, "measured")
    measure_peak_flops("cuda", "fp32")
    measure_peak_flops("cpu")
    assert measured == [
        ("cuda", torch.bfloat16, device_peak.CUDA_SIZE),
        ("cuda", torch.float32, device_peak.CUDA_SIZE),
        ("cpu", torch.float32, device_peak.CPU_SIZE),
    ]


@pytest.mark.parametrize(
    ("argument", "asked"),
    [({}, ("cpu", None)), ({"device": "cuda:3", "precision": "fp32"}, ("cuda:3", "fp32"))],
)
def test_peak_flops_are_measured_for_the_requested_device_and_precision(monkeypatch, argument, asked):
    calls = []
    monkeypatch.setattr(
        device_peak, "measure_peak_flops", lambda *arguments: calls.append(arguments) or PeakRate(1.0, "table")
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        device_peak.run(argument, theirs)
        assert json.loads(ours.makefile().readline()) == {"peak_flops": 1.0, "source": "table"}
    assert calls == [asked]


def test_a_cpu_is_measured_with_one_thread_as_ranks_compute_and_keeps_its_threads(monkeypatch):
    monkeypatch.setattr(device_peak, "MEASURE_SECONDS", 0.01)
    product, used, before = torch.mm, set(), torch.get_num_threads()

    def mm(*arguments, **options):
        used.add(torch.get_num_threads())
        return product(*arguments, **options)

    monkeypatch.setattr(torch, "mm", mm)
    torch.set_num_threads(2)
    try:
        measure_peak_flops("cpu")
        assert (used, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_ranks_on_unequal_gpus_have_the_mean_of_their_peaks():
    assert peak_of_stages(300e12, ("A100", "A100", "V100")) == pytest.approx(300e12 * (312 + 312 + 112) / (3 * 312))
    assert peak_of_stages(19.5e12, ("A100", "V100"), "fp32") == pytest.approx((19.5e12 + 14e12) / 2)
    assert peak_of_stages(100e12, ("V100", "A100")) == pytest.approx(100e12 * (112 + 312) / (2 * 112))
    assert peak_of_stages(300e12, ()) == peak_of_stages(300e12, ("A100", "B7")) == 300e12
