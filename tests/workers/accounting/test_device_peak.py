"""Peak rates: known GPUs by name, a CPU by measurement."""

import json
import socket

import pytest

from workers.accounting import device_peak
from workers.accounting.device_table import DEVICE_PEAKS, known_peak


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
def test_known_devices(name, bf16, fp32):
    assert known_peak(name) == bf16
    assert known_peak(name, "fp32") == fp32


def test_no_device_is_taken_for_another_whose_name_is_in_its_own():
    assert [known_peak(f"NVIDIA {device.name.upper()}") for device in DEVICE_PEAKS] == [
        device.bf16 for device in DEVICE_PEAKS
    ]


def test_unknown_device_has_no_peak():
    assert known_peak("Riva 128") is None


def test_cpu_is_measured():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert device_peak.run({"device": "cpu"}, theirs) == 0
        found = json.loads(ours.makefile().readline())
    assert found["source"] == "measured"
    assert 1e8 < found["peak_flops"] < 1e13
