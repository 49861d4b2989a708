"""Memory that a GPU's driver does not pin is used as it is, and nothing else is blamed for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from manta.workers.system.gpu import PinnedMemory


class Runtime:
    """CUDA's, which keeps the last error until it is asked for it, as torch asks behind each kernel."""

    def __init__(self, answer: int):
        self.answer, self.last, self.registered = answer, 0, []

    def cudaHostRegister(self, address, size, flags):
        self.last = self.answer
        self.registered += [(address, size)] if not self.answer else []
        return self.answer

    def cudaHostUnregister(self, address):
        self.registered = [each for each in self.registered if each[0] != address]

    def kernel(self, *_, **__):
        error, self.last = self.last, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return SimpleNamespace(add_=self.kernel)


@pytest.fixture
def runtime(monkeypatch):
    def of(answer: int) -> Runtime:
        made = Runtime(answer)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(torch, "ones", made.kernel)
        return made

    return of


def test_refused_pinning_does_not_become_the_next_kernels_error(runtime, capsys):
    cuda = runtime(2)
    pinned = PinnedMemory(torch.zeros(6), on_gpu=True)
    assert pinned.error == 2 and "24 bytes for copies cannot be pinned (CUDA error 2)" in capsys.readouterr().out
    cuda.kernel()
    pinned.release()
    assert not cuda.registered


def test_memory_stays_pinned_until_released(runtime):
    cuda, memory = runtime(0), torch.zeros(6)
    pinned = PinnedMemory(memory, on_gpu=True)
    assert pinned.error == 0 and cuda.registered == [(memory.data_ptr(), 24)]
    pinned.release()
    assert not cuda.registered
