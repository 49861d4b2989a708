"""What is asked of NCCL when groups are broken off, in which order. It is played here: nothing of this has run on a
GPU. What gloo does is in `test_process_groups.py` and `test_repair.py`."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from manta.workers.comm import regroup
from manta.workers.comm.regroup import GlooAborter, LastingGroups, NcclAborter, NewGroups, regroup_for
from manta.workers.errors import DeviceLost

GPU = torch.device("cuda:0")
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class FirstNccl:
    """Stands in for torch's first NCCL backend."""

    def __init__(self, asked, name):
        self._group_start = lambda: asked.append(f"{name} begins")
        self._group_end = lambda: asked.append(f"{name} ends")


@pytest.fixture
def asked(monkeypatch):
    """What was asked of NCCL and of the device so far."""
    calls: list[str] = []
    monkeypatch.delenv(HANDLING, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"drain {device}"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FirstNccl, raising=False)
    monkeypatch.setattr(regroup.distributed_c10d, "_abort_process_group", lambda: calls.append("forget"))
    return calls


def groups(asked, names):
    """Groups that note what is asked of them."""

    def group(name):
        backend = FirstNccl(asked, name)
        return SimpleNamespace(abort=lambda: asked.append(f"abort {name}"), _get_backend=lambda device: backend)

    return [group(name) for name in names]


def test_nccl_communicators_are_aborted_in_one_group_newest_first(asked):
    NcclAborter(GPU, wanted=True).abort(groups(asked, ["world", "tensor", "data"]), None)
    assert asked == ["world begins", "abort data", "abort tensor", "abort world", "world ends"]


def test_nccl_abort_without_communicators_does_nothing(asked):
    NcclAborter(GPU, wanted=True).abort([], dist.HashStore())
    assert asked == []


class NcclOptions(SimpleNamespace):
    """Those of one group, which torch for CPUs does not have."""

    def __init__(self, **given: bool):
        super().__init__(config=SimpleNamespace(blocking=1), _timeout=None, **given)


@pytest.mark.parametrize("wanted", [True, False])
def test_streams_of_communicators_have_high_priority(monkeypatch, wanted):
    """Each group has options of its own, which torch fills in."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    first, second = (NcclAborter(GPU, wanted).options() for _ in range(2))
    assert first is not second
    assert first.is_high_priority_stream


def test_nccl_communicators_of_a_dying_process_are_left_to_torch(asked, monkeypatch):
    monkeypatch.setenv(HANDLING, "0")  # of groups before, of a self-test that has failed
    breaking = NcclAborter(GPU, wanted=False)
    breaking.begin()
    breaking.abort(groups(asked, ["world"]), None)
    assert asked == []
    assert HANDLING not in os.environ


def test_nccl_groups_of_a_surviving_process_do_not_block_and_watchdog_only_reports(asked, monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    breaking = NcclAborter(GPU, wanted=True)
    breaking.begin()
    options = breaking.options()
    assert (options.config.blocking, options._timeout) == (0, regroup.MEETING_TIMEOUT)
    assert os.environ[HANDLING] == "0"
    monkeypatch.delenv(HANDLING)


def test_groups_are_aborted_before_the_device_is_drained(asked, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    left = NewGroups("nccl", NcclAborter(GPU, wanted=True))
    left._groups = dict(zip(["world", "data"], groups(asked, ["world", "data"]), strict=True))
    left.abort()
    left.leave()
    assert asked == ["world begins", "abort data", "abort world", "world ends", "forget", "drain cuda:0"]


class SlowToEnd:
    """A group one of whose threads is in a collective that ends late."""

    def __init__(self, may_end: threading.Event, ended: threading.Event):
        self._may_end, self._ended = may_end, ended

    def __del__(self):
        self._may_end.wait(30.0)
        self._ended.set()


@pytest.mark.parametrize("kind", [NewGroups, LastingGroups])
def test_endless_collective_does_not_delay_a_recovery(monkeypatch, kind):
    """A recovery does not wait for what is known not to have ended."""
    monkeypatch.setattr(regroup, "_END_SECONDS", 60.0)
    may_end, ended = threading.Event(), threading.Event()
    left = kind("gloo", GlooAborter())
    left._groups = {"world": SlowToEnd(may_end, ended)}
    left.leave(all_ended=False)
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(30.0)


def test_broken_device_raises_its_own_error_on_leaving_groups(asked, monkeypatch):
    def synchronize(device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match=r"reports an error after .* illegal memory access was encountered$"):
        NewGroups("nccl", NcclAborter(GPU, wanted=True)).leave()


@pytest.mark.parametrize(
    ("device", "in_place", "reconfigures", "second", "expected"),
    [
        ("cpu", True, False, False, ("gloo", "abort and new groups")),
        ("cpu", True, True, False, ("gloo", "reconfigure")),
        ("cpu", False, True, False, ("gloo", "abort and new groups")),
        ("cuda:0", True, False, False, ("nccl", "abort and new groups")),
        ("cuda:0", True, True, False, ("nccl", "abort and new groups")),
        ("cuda:0", True, True, True, ("nccl", "reconfigure")),
        ("cuda:0", False, True, True, ("nccl", "abort and new groups")),
    ],
)
def test_groups_are_reconfigured_in_place_where_torch_can(
    monkeypatch, device, in_place, reconfigures, second, expected
):
    monkeypatch.delattr(regroup.distributed_c10d, "_reconfigure", raising=False)
    if reconfigures:
        monkeypatch.setattr(regroup.distributed_c10d, "_reconfigure", None, raising=False)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1" if second else "0")
    made = regroup_for(torch.device(device), in_place)
    assert (made._kind, made.way) == expected


def test_second_nccl_backend_is_aborted_without_brackets(asked, monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", str)
    NcclAborter(GPU, wanted=True).abort(groups(asked, ["world", "data"]), None)
    assert asked == ["abort data", "abort world"]


@pytest.mark.parametrize(("said", "kept"), [(None, "8000"), ("50", "50")])
def test_nccl_recorder_size_is_set_unless_the_user_chose_one(monkeypatch, said, kept):
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", said or "")
    if said is None:
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    NcclAborter(GPU, wanted=True).begin()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == kept
