"""The self-test of repair in place passes over gloo, and says what is wrong where it does not: played here, since gloo
does what it should."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import pytest
import torch
import torch.distributed as dist
from engine_specs import axes
from rank_processes import HOST, SECRET

from manta.workers.comm import repair_self_test
from manta.workers.comm.backend import DONE, Handle
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import Axis
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.comm.repair_self_test import RepairSelfTest
from manta.workers.config import ParallelConfig

FOUR = ParallelConfig(**axes((2, 1, 2)))


def goes_on_after_the_self_test(comm: Comm, port: int) -> tuple[RepairSelfTest, float]:
    """The self-test in the generation after this one, then a sum of ones there."""
    generation = comm.generation + 1_000_000
    comm.close()
    store = dist.TCPStore(HOST, port, is_master=False)
    result = comm.try_repair(store, generation)
    comm.connect(store, generation, HOST, SECRET)
    tensor = torch.ones(1)
    comm.all_reduce("world", tensor)
    comm.barrier()
    return result, tensor.item()


def test_repair_self_test_passes_and_communication_goes_on(ranks):
    for result, total in ranks.run(FOUR, goes_on_after_the_self_test, ranks.port, backend="process_groups"):
        assert (result.passed, result.problem, result.usable, result.nccl_version) == (True, "", True, None)
        assert (result.torch_version, total) == (torch.__version__, 4.0)
        assert repair_self_test.BLOCKED_SECONDS <= result.seconds < repair_self_test.PATIENCE.total_seconds()
        assert result.sentence.startswith("repair in place works here (")


class Spoiled(ProcessGroups):
    """Groups that are not what they should be, on rank 1 alone."""

    spoiled_by, number, sums = "", 0, 0

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool) -> Handle:
        self.sums += 1
        if self._rank == 1 and self.spoiled_by == "returns" and self.sums == 2:
            return DONE
        if self._rank == 1 and self.spoiled_by == "wrong" and self.number == 2:
            tensor.add_(1.0)
        return super().start_all_reduce(axis, tensor, largest)


def tries(comm: Comm, kind: str, port: int) -> RepairSelfTest:
    """The self-test over spoiled groups."""
    comm.close()
    numbers = count(1)

    def make() -> ProcessGroups:
        groups = Spoiled(comm.grid, comm.rank, comm.device, comm._regroup)
        groups.spoiled_by, groups.number = kind, next(numbers)
        return groups

    with pytest.MonkeyPatch.context() as patch:
        if (comm.rank, kind) == (1, "returns"):
            patch.setattr(repair_self_test, "BLOCKED_SECONDS", 20.0)  # that it returns is seen, however late
        store = store_of(comm, port)
        return repair_self_test.try_repair(make, store, comm.rank, comm.size("world"), comm.device, "as a test has it")


def store_of(comm: Comm, port: int) -> dist.Store:
    """A self-test's own."""
    return dist.PrefixStore(f"spoiled-{comm.generation}", dist.TCPStore(HOST, port, is_master=False))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("returns", "rank 1: an all-reduce did not wait for a rank that took no part (it returned)"),
        ("wrong", "the all-reduce over the new groups is wrong"),
    ],
)
def test_repair_self_test_failure_on_one_rank_is_known_to_all(ranks, kind, problem):
    results = ranks.run(FOUR, tries, kind, ranks.port, backend="process_groups", seconds=60)
    assert [result.passed for result in results] == [False] * 4
    assert len({result.problem for result in results}) == 1
    assert problem in results[0].problem
    assert all(result.usable for result in results)
    assert results[0].sentence.endswith("after a failure all ranks are restarted")


def hangs(comm: Comm, port: int) -> RepairSelfTest:
    """Rank 1's wait is not broken off, and its peers break nothing off, nor leave, before it has said so."""
    interrupt, said = ProcessGroups.interrupt, dist.PrefixStore("broken-off", store_of(comm, port))

    def interrupt_late(groups: ProcessGroups) -> None:
        if comm.rank != 1:
            said.wait(["problem"], timedelta(seconds=40))
            interrupt(groups)

    comm.close()  # its own groups, as `tries` does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroups, "interrupt", interrupt_late)
        if comm.rank == 1:
            patch.setattr(repair_self_test, "PATIENCE", timedelta(seconds=1.0))
        return tries(comm, "", port)


def test_repair_self_test_with_an_endless_wait_marks_the_process_unusable(ranks):
    results = ranks.run(FOUR, hangs, ranks.port, backend="process_groups", seconds=60)
    assert [result.passed for result in results] == [False] * 4
    assert "an all-reduce that was interrupted still waited after 1 s" in results[0].problem
    assert not results[1].usable
