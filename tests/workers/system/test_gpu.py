"""What a process that computes on a GPU sets, and what it says where no attention kernel is left."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_specs import spec

from manta.workers.errors import DataError, DeviceLost, ModelError
from manta.workers.model.core_attention import Visible, cached_attention
from manta.workers.system import gpu

CUBLAS, COMPILER = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK"
FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def chosen(monkeypatch):
    """The devices that were set; this process's flags are put back afterwards."""
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    names = ("math", "flash", "mem_efficient", "cudnn")
    enabled = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in names}
    before, order = {name: getattr(matmul, name) for name in FLAGS}, torch._C._get_sdp_priority_order()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    for name in (CUBLAS, COMPILER):
        monkeypatch.setenv(name, "")  # so that what is set here is gone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    devices: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    yield devices
    gpu.leave()
    for name, on in enabled.items():
        getattr(cuda, f"enable_{name}_sdp")(on)
    torch._C._set_sdp_priority_order(order)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    for name, value in before.items():
        setattr(matmul, name, value)


def test_sums_stay_wide_and_attention_fused_on_gpus_only(chosen):
    gpu.use(torch.device("cpu"))
    assert chosen == []
    assert torch.backends.cuda.math_sdp_enabled()
    gpu.use(torch.device("cuda:1"))
    gpu.use(torch.device("cuda"))
    assert chosen == ["cuda:1", "cuda:0"]
    assert not any(getattr(torch.backends.cuda.matmul, flag) for flag in FLAGS)
    assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize(
    ("capability", "same_bits", "order"),
    [
        ((9, 0), False, "cudnn flash efficient"),
        ((8, 6), False, "flash efficient cudnn"),
        ((9, 0), True, "flash efficient"),
    ],
)
def test_attention_uses_the_best_kernel_of_the_gpu_but_never_the_math_one(
    chosen, monkeypatch, capability, same_bits, order
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu.use(torch.device("cuda:0"), same_bits)
    names = {1: "flash", 2: "efficient", 3: "cudnn"}
    usable = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}
    first = [names[number] for number in torch._C._get_sdp_priority_order() if number in names]
    allowed = [name for name in first if getattr(torch.backends.cuda, f"{usable[name]}_sdp_enabled")()]
    assert allowed == order.split() and not torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("train", [{"deterministic_kernels": True}, {"deterministic": "elastic"}, {}])
def test_gpu_kernels_are_deterministic_if_the_job_wants_it(chosen, train):
    gpu.use_for(spec(train=train), torch.device("cuda:0"))
    assert torch.are_deterministic_algorithms_enabled() == bool(train)
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "for flash attention that is not enough"
    assert torch.utils.deterministic.fill_uninitialized_memory != bool(train)
    assert (CUBLAS in os.environ) == bool(train)
    assert os.environ.get(COMPILER) == ("0" if train else None)


def test_torch_compiler_reads_the_setting_that_fixes_summation_order():
    assert COMPILER in (Path(torch.__file__).parent / "_inductor" / "config.py").read_text()


def test_attention_without_an_available_kernel_advises_the_explicit_one(monkeypatch):
    q, visible = torch.randn(1, 4, 2, 8), Visible(None)
    refusing = Mock(side_effect=RuntimeError("No available kernel. Aborting execution."))
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", refusing)
        with pytest.raises(ModelError, match=r"set train\.attention: explicit"):
            cached_attention(q, q, q, visible)
    assert cached_attention(q, q, q, visible).shape == q.shape


def test_gpu_errors_without_a_better_name_are_unchanged():
    error = RuntimeError("CUDA error: misaligned address")
    assert gpu.named(error) is gpu.as_lost(error) is error


HARDWARE = [
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous"),
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("No CUDA GPUs are available"),
    RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.29.7\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\nCuda failure 220 'uncorrectable NVLink error detected during execution'"
    ),
]


@pytest.mark.parametrize("error", HARDWARE, ids=str)
def test_a_gpu_that_has_failed_is_the_machines_fault(error):
    lost = gpu.as_lost(error)
    assert isinstance(lost, DeviceLost)
    assert lost.__cause__ is error
    assert str(lost).startswith("the GPU has failed: ")
    assert "\n" not in str(lost)


@pytest.mark.parametrize("error", [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    DataError("no CUDA-capable device.txt"),
    ValueError("GPU is lost"),
], ids=str)  # fmt: skip
def test_gpu_errors_that_a_program_can_cause_are_not_called_a_lost_gpu(error):
    assert gpu.as_lost(error) is error
