"""What a process that computes on a GPU sets, and what it says where no attention kernel is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from workers.errors import ModelError
from workers.model.core_attention import Visible, cached_attention
from workers.system import gpu

FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def chosen(monkeypatch):
    """The devices that were set; this process's flags are put back afterwards."""
    matmul, math = torch.backends.cuda.matmul, torch.backends.cuda.math_sdp_enabled()
    before = {name: getattr(matmul, name) for name in FLAGS}
    devices: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    yield devices
    torch.backends.cuda.enable_math_sdp(math)
    for name, value in before.items():
        setattr(matmul, name, value)


def test_sums_stay_wide_and_attention_fused(chosen):
    gpu.use(torch.device("cuda:1"))
    assert chosen == ["cuda:1"]
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_a_cpu_keeps_what_it_has(chosen):
    gpu.use(torch.device("cpu"))
    assert chosen == []
    assert torch.backends.cuda.math_sdp_enabled()


def test_where_no_kernel_is_left_the_way_out_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("No available kernel. Aborting execution.")

    q, visible = torch.randn(1, 4, 2, 8), Visible(None)
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", refuse)
        with pytest.raises(ModelError, match=r"set train\.attention: explicit"):
            cached_attention(q, q, q, visible)
    assert cached_attention(q, q, q, visible).shape == q.shape


def test_other_errors_stay_what_they_are():
    error = RuntimeError("CUDA error: misaligned address")
    assert gpu.named(error) is error
