"""What is installed is compared with what is needed, and with the machine."""

import importlib.metadata
from unittest.mock import Mock

import pytest

from manta.service import torch_facts
from manta.service.cluster.ray_private import TRIED_WITH
from manta.service.doctor import packages

CPU = {"version": "2.13.0+cpu", "cuda": None, "nccl": None, "devices": []}
CUDA = {"version": "2.14.1", "cuda": "13.0", "nccl": "2.29.1", "devices": ["H100", "H100"]}


def test_doctor_finds_all_required_packages_of_this_environment():
    (seen,) = packages.requirements()
    assert seen.verdict == "ok" and seen.message.startswith("manta-train ")
    (seen,) = packages.ray()
    assert seen.verdict == "ok"


def test_doctor_names_missing_and_outdated_packages(monkeypatch):
    wanted = ["numpy>=99", "no-such-package>=1", "pydantic>=2", "moto>=99; extra == 'dev'"]
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: wanted)
    seen = list(packages.requirements())
    numpy = importlib.metadata.version("numpy")
    assert [each.message for each in seen] == [f"numpy is {numpy}, not >=99", "no-such-package is not installed"]
    assert {each.verdict for each in seen} == {"problem"}


def test_doctor_warns_of_a_source_folder_without_an_installation(monkeypatch):
    monkeypatch.setattr(
        packages.importlib.metadata, "requires", Mock(side_effect=importlib.metadata.PackageNotFoundError)
    )
    assert [each.verdict for each in packages.requirements()] == ["warning"]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.51.9", "warning"), (TRIED_WITH[0], "ok"), ("2.55.1", "ok"), (TRIED_WITH[1], "ok"), ("2.99.0", "warning")],
)
def test_doctor_warns_of_an_untested_ray_version(monkeypatch, version, verdict):
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: version)
    (seen,) = packages.ray()
    assert seen.verdict == verdict
    assert (verdict == "warning") == all(each in seen.advice for each in TRIED_WITH)


@pytest.mark.parametrize(("about", "gpus", "verdict", "said"), [
    (CPU, 0, "ok", "ranks take CPU slots"),
    (CPU, 2, "problem", "is a CPU build, and this machine has 2 GPUs"),
    (CUDA, 2, "ok", "CUDA 13.0, driver 570.1, NCCL 2.29.1; GPUs: H100, H100"),
    (CUDA, 3, "problem", "it sees 2 of 3 GPUs"),
    ({**CUDA, "devices": []}, 1, "problem", "it sees 0 of 1 GPUs"),
    (CUDA, 0, "ok", "this machine has no GPU"),
])  # fmt: skip
def test_torch_has_to_see_the_gpus_of_the_machine(about, gpus, verdict, said):
    seen = packages.judge_torch(about, gpus, "570.1")
    assert seen.verdict == verdict and said in seen.message


TORCH = """
__version__ = "2.13.0+cpu"
class version:
    cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
"""
"""As much of it as is asked, in milliseconds."""


def test_doctor_imports_torch_in_a_separate_process(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (seen,) = packages.torch(gpus=0)
    assert seen == packages.judge_torch(CPU, 0, None)


@pytest.mark.soak
def test_doctor_accepts_the_torch_of_this_environment():
    (seen,) = packages.torch(gpus=0)
    assert seen.verdict == "ok" and seen.message.startswith("torch 2.")


def test_a_torch_that_cannot_be_imported_is_quoted(monkeypatch):
    monkeypatch.setattr(torch_facts, "_ASK", "raise ImportError('libcudart.so.13: no such file')")
    (seen,) = packages.torch(gpus=0)
    assert seen.verdict == "problem" and seen.message.endswith("ImportError: libcudart.so.13: no such file")


def test_a_control_plane_needs_no_torch(monkeypatch):
    version = importlib.metadata.version

    def without_torch(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(packages.importlib.metadata, "version", without_torch)
    (requirements,), (torch,) = packages.requirements(), packages.torch(gpus=8)
    assert (requirements.verdict, torch.verdict) == ("ok", "warning")
    assert "no ranks can run on it" in torch.message


def test_doctor_reads_the_version_of_the_gpu_driver(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2026\nGCC version: 12\n")
    assert packages.driver_version(file) == "570.124.06"
    assert packages.driver_version(tmp_path / "none") is None
