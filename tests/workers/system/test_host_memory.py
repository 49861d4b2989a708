"""How much memory a process may still have."""

import pytest

from manta.workers.system.resources import killed_for_memory, memory_available

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
