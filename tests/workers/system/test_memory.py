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


@pytest.fixture
def machine(tmp_path):
    """What a process may have on a machine with these files."""

    def available(membership=None, **files):
        if membership is not None:
            files["proc/self/cgroup"] = membership
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content + "\n")
        return memory_available(tmp_path)

    return available


MEMINFO = {"proc/meminfo": "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   40 kB"}


def test_available_memory_is_what_the_kernel_says(machine):
    assert machine(**MEMINFO) == 40 * KIB


def test_available_memory_is_unlimited_if_the_kernel_does_not_say(machine):
    assert machine() > 2**60
    assert machine(**{"proc/meminfo": "MemTotal: 100 kB"}) > 2**60


def test_container_memory_is_what_its_group_leaves_including_droppable_pages(machine):
    group = "sys/fs/cgroup"  # the path of the group is the machine's, which nobody sees here
    limits = {f"{group}/memory.max": str(30 * KIB), f"{group}/memory.current": str(20 * KIB)}
    stat = {f"{group}/memory.stat": f"anon 7\ninactive_file {4 * KIB}"}
    assert machine("0::/pods/pod", **MEMINFO, **limits, **stat) == 14 * KIB
    assert machine("0::/pods/pod", **{f"{group}/memory.max": "max"}) == 40 * KIB


def test_memory_limits_of_cgroups_v1_are_read(machine):
    group = "sys/fs/cgroup/memory/docker/one"
    limits = {f"{group}/memory.limit_in_bytes": str(9 * KIB), f"{group}/memory.usage_in_bytes": str(8 * KIB)}
    stat = {f"{group}/memory.stat": f"total_inactive_file {2 * KIB}"}
    assert machine("4:cpu:/docker/one\n5:memory:/docker/one", **MEMINFO, **limits, **stat) == 3 * KIB


@pytest.mark.parametrize(("said", "killed"), [
    ("nr_free_pages 7\noom_kill 3\noom_kill_other 9\n", 3), ("nr_free_pages 7\n", None), ("oom_kill x\n", None),
    (None, None),
])  # fmt: skip
def test_memory_kills_are_read_from_the_kernels_counter(tmp_path, said, killed):
    (tmp_path / "proc").mkdir()
    if said is not None:
        (tmp_path / "proc" / "vmstat").write_text(said)
    assert killed_for_memory(tmp_path) == killed
