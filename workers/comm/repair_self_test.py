"""Tests on all ranks whether process groups can be repaired in place, before the job relies on it.

The ranks create groups, wait in a sum that the last rank does not join, abort it from another thread, recreate the
groups in the same processes, and verify a sum. Problems with drivers, NCCL or the network then appear before the first
step, and only disable the repair in place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from manta.workers.comm.lost_peers import OF_THE_DEVICE, first_line
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.errors import MantaError, PeerLost

BLOCKED_SECONDS = 0.3
"""How long a sum must be observed not to return without the last rank."""
PATIENCE = timedelta(seconds=20)
"""How long to wait for a rank that ends its part, and for an aborted wait."""


class _Stuck(MantaError):
    """An aborted wait continues: nothing else can be done with this process."""


@dataclass(frozen=True)
class RepairSelfTest:
    """Result of the test, known to all ranks."""

    passed: bool
    problem: str
    """Problem of the first rank that had one; empty if the test passed."""
    seconds: float
    """Duration of the whole test, on this rank."""
    way: str
    """See `Regroup.way`."""
    torch_version: str
    nccl_version: str | None
    """None if it is not NCCL."""
    usable: bool = True
    """Whether this process can continue without repair in place."""

    @property
    def sentence(self) -> str:
        """For the user."""
        if self.passed:
            return f"repair in place works here ({self.way}, tested in {self.seconds:.1f} s)"
        return f"no repair in place: {self.problem}; after a failure all ranks are restarted"

    def to_json(self) -> dict[str, Any]:
        """The event's data."""
        return {name: value for name, value in asdict(self).items() if name != "usable"}


def try_repair(
    make: Callable[[], ProcessGroups], store: dist.Store, rank: int, world: int, device: torch.device, way: str
) -> RepairSelfTest:
    """Run the test with all other ranks. `make`: creates groups that are not connected yet; `store`: for this test
    only. Leaves no groups behind."""
    began = time.monotonic()

    def check_new_groups(part: Callable[[ProcessGroups], str], name: str) -> tuple[str, bool]:
        """The problem on some rank, if any, and whether this process can be used afterwards."""
        apart, usable = dist.PrefixStore(name, store), True
        try:
            problem = _over(make(), apart, part)
        except (_Stuck, *OF_THE_DEVICE) as error:
            problem, usable = first_line(error), False
        except (RuntimeError, MantaError) as error:
            problem = first_line(error)
        return _of_all(apart, rank, world, problem), usable

    def aborted(groups: ProcessGroups) -> str:
        if _sum(groups, 1.0, device) != world:
            return "an all-reduce was wrong before anything was interrupted"
        try:
            if rank < world - 1:
                _abort(groups, device)
        finally:
            _announce(store, "free", world)
        store.wait(["all-free"], PATIENCE)  # the end of the last rank would release the others
        return ""

    def recreated(groups: ProcessGroups) -> str:
        right = _sum(groups, rank + 1.0, device) == world * (world + 1) / 2
        return "" if right else "the all-reduce over the new groups is wrong"

    problem, usable = check_new_groups(aborted, "broken-off")
    if not problem:
        problem, usable = check_new_groups(recreated, "made-anew")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    seconds = round(time.monotonic() - began, 3)
    return RepairSelfTest(not problem, problem, seconds, way, torch.__version__, nccl, usable)


def _over(groups: ProcessGroups, store: dist.Store, part: Callable[[ProcessGroups], str]) -> str:
    try:
        groups.connect(store)
        return part(groups)
    finally:
        groups.close()


def _sum(groups: ProcessGroups, number: float, device: torch.device) -> float:
    tensor = torch.full((1,), number, device=device, dtype=torch.float64)
    groups.start_all_reduce("world", tensor, largest=False).wait()
    total = tensor.item()
    groups.confirm()
    return total


def _abort(groups: ProcessGroups, device: torch.device) -> None:
    """Abort a sum that waits. Raises _Stuck if it goes on, RuntimeError if it did not wait or ended without error."""
    ended: list[BaseException | None] = []

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            _sum(groups, 1.0, device)
            ended.append(None)
        except (RuntimeError, MantaError) as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, name="repair self-test", daemon=True)
    waiting.start()
    waiting.join(BLOCKED_SECONDS)
    if ended and not isinstance(ended[0], PeerLost):  # a peer may have been faster, whose end is an error here
        raise RuntimeError(f"an all-reduce did not wait for a rank that took no part ({ended[0] or 'it returned'})")
    groups.interrupt()
    waiting.join(PATIENCE.total_seconds())
    if not ended:
        raise _Stuck(f"an all-reduce that was interrupted still waited after {PATIENCE.total_seconds():g} s")
    if not isinstance(ended[0], PeerLost):
        raise RuntimeError(
            f"an all-reduce that was interrupted ended otherwise than by an error ({ended[0] or 'it returned'})"
        )


def _announce(store: dist.Store, what: str, wanted: int) -> None:
    """Note that this rank has come so far; the last of `wanted` announces it to all."""
    if store.add(what, 1) == wanted:
        store.set(f"all-{what}", "")


def _of_all(store: dist.Store, rank: int, world: int, problem: str) -> str:
    """The first problem of any rank; it is also a problem if a rank cannot report whether it has one."""
    try:
        if problem:
            store.compare_set("problem", "", f"rank {rank}: {problem}")
        _announce(store, "done", world)
        store.wait(["all-done"], 2 * PATIENCE)
        return store.get("problem").decode() if store.check(["problem"]) else ""
    except RuntimeError as error:
        return problem or f"not all ranks came to the end of the self-test ({first_line(error)})"
