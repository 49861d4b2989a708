"""How many cores a process may use: those it is bound to, and what its control groups leave it."""

import os

import pytest

from manta.workers.system.resources import usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine's files, and how many of its cores the process is bound to."""

    def make(bound, membership=None, **files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)))
        if membership is not None:
            files["proc/self/cgroup"] = membership
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content + "\n")
        return usable_cores(tmp_path)

    return make


def test_unlimited_process_has_the_cores_it_is_bound_to(machine):
    assert machine(64) == 64
    assert machine(3, "0::/user", **{"sys/fs/cgroup/user/cpu.max": "max 100000"}) == 3


@pytest.mark.parametrize(("quota", "cores"), [("800000", 8), ("250000", 2), ("50000", 1), ("max", 16), ("many", 16)])
def test_core_limit_is_counted_in_whole_cores(machine, quota, cores):
    assert machine(16, "0::/job", **{"sys/fs/cgroup/job/cpu.max": f"{quota} 100000"}) == cores


def test_core_limits_of_enclosing_groups_apply(machine):
    files = {"sys/fs/cgroup/pods/pod/cpu.max": "max 100000", "sys/fs/cgroup/pods/cpu.max": "400000 100000"}
    assert machine(16, "0::/pods/pod", **files) == 4


def test_core_limit_in_a_container_is_read_from_the_topmost_group(machine):
    assert machine(16, "0::/kubepods/pod/container", **{"sys/fs/cgroup/cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 16)])
def test_core_limits_of_cgroups_v1_are_read(machine, quota, cores):
    group = "sys/fs/cgroup/cpu,cpuacct/docker/one"
    files = {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": "100000"}
    assert machine(16, "5:memory:/docker/one\n4:cpu,cpuacct:/docker/one", **files) == cores
