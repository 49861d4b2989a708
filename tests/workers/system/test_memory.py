"""Memory of the host: how much there is, and pages that stay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from manta.workers.system.gpu import PinnedMemory
from manta.workers.system.host_memory import killed_for_memory, memory_available


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


KIB = 1024


MEMINFO = {"proc/meminfo": "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   40 kB"}
GROUP, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory/docker/one"
POD = {f"{GROUP}/memory.max": str(30 * KIB), f"{GROUP}/memory.current": str(20 * KIB),
       f"{GROUP}/memory.stat": f"anon 7\ninactive_file {4 * KIB}"}  # fmt: skip
CONTAINER = {f"{V1}/memory.limit_in_bytes": str(9 * KIB), f"{V1}/memory.usage_in_bytes": str(8 * KIB),
             f"{V1}/memory.stat": f"total_inactive_file {2 * KIB}"}  # fmt: skip


@pytest.mark.parametrize(("membership", "files", "bytes_left"), [
    (None, MEMINFO, 40 * KIB),
    (None, {}, None),
    (None, {"proc/meminfo": "MemTotal: 100 kB"}, None),
    ("0::/pods/pod", MEMINFO | POD, 14 * KIB),  # the path is the machine's, which nobody sees here
    ("0::/pods/pod", MEMINFO | {f"{GROUP}/memory.max": "max"}, 40 * KIB),
    ("4:cpu:/docker/one\n5:memory:/docker/one", MEMINFO | CONTAINER, 3 * KIB),
])  # fmt: skip
def test_available_memory_is_what_kernel_and_group_leave_including_droppable_pages(
    machine_files, membership, files, bytes_left
):
    available = memory_available(machine_files(membership, **files))
    assert available > 2**60 if bytes_left is None else available == bytes_left


@pytest.mark.parametrize(("said", "killed"), [
    ("nr_free_pages 7\noom_kill 3\noom_kill_other 9\n", 3), ("nr_free_pages 7\n", None), ("oom_kill x\n", None),
    (None, None),
])  # fmt: skip
def test_memory_kills_are_read_from_the_kernels_counter(tmp_path, said, killed):
    (tmp_path / "proc").mkdir()
    if said is not None:
        (tmp_path / "proc" / "vmstat").write_text(said)
    assert killed_for_memory(tmp_path) == killed
