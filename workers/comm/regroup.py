"""The process groups of one rank, through the generations that its process survives: created, aborted by another
thread, and recreated.

torch.distributed has no public API for this, so this module, and no other, uses private or experimental parts of it.
"Tried" means: with these versions, by the tests. NCCL has not been tried, since no GPU was available; the names are
those of torch 2.11, 2.13 and 2.14.

- NCCL: `ProcessGroup.abort` between `ProcessGroupNCCL._group_start` and `_group_end` ends communicators whose kernels
  wait, all of them together; `_abort_process_group` does that and forgets them. `Options.config.blocking`: a
  communicator can be broken off while it is made. `TORCH_NCCL_ASYNC_ERROR_HANDLING`: NCCL's watchdog, which must not
  end the process. `TORCH_FR_BUFFER_SIZE`: how much its flight recorder remembers.
- gloo, which cannot be aborted: its connections, as the kernel names them (`workers/system/sockets.py`). Tried:
  2.13.0, 2.14.1.
- `_world.group_count`: goes into keys that all ranks have in common. Tried: 2.13.0, 2.14.1.
- Groups that stay and are given new members, from 2.14 on: `_new_process_group_helper(enable_reconfigure=True)`,
  `_get_reconfigure_handle`, `_reconfigure`. Tried: 2.14.1 over gloo. Of NCCL, torch's second backend alone can do it
  (`TORCH_DIST_USE_NCCL2=1`).

Whether all of that works where a job runs is tried there, before the job relies on it (`repair_self_test.py`).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from manta.workers.errors import DeviceLost
from manta.workers.settings import nccl_is_the_second
from manta.workers.system.sockets import Connection, break_connections, open_connections

MEETING_TIMEOUT = timedelta(seconds=20)
"""Seconds: when groups are made all members are there, so one that does not answer is dead or stopped."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A dead peer is noticed through its process long before this; it only limits waits that nothing supervises."""
_REPORTED_ONLY = "0"
_RECORDED_OPERATIONS = "8000"
"""Entries of NCCL's flight recorder, unless the environment says how many: a step of a large model has 2,000, which is
torch's own number. Measured over gloo with torch 2.13: 10 MB."""
_END_SECONDS = 0.5

Members = Mapping[str, Sequence[int]]
"""Global ranks of each group, in order, by its name. All members have the groups that they share in the same order."""
Groups = dict[str, dist.ProcessGroup]


class GroupAborter(Protocol):
    """How communication over one kind of groups is aborted."""

    def begin(self) -> None:
        """Groups are about to be created."""
        ...

    def made(self) -> None:
        """The groups have been created."""
        ...

    def options(self) -> Any:
        """The value for torch's `pg_options` of such a group."""
        ...

    def abort(self, groups: Sequence[dist.ProcessGroup], store: dist.Store | None) -> None:
        """Called by any thread: release the threads that wait in one of `groups`, or are creating them. `store`: the
        one through which they are being created; None once they are."""
        ...

    def drain(self) -> None:
        """Return once none of their work is running any more. Raises DeviceLost."""
        ...


class GlooAborter:
    """Gloo has no abort. But an error on a connection ends the waits on it, here and at its other end, as a peer's
    death would: so all connections that were opened for the groups are shut down. Destroying groups, which waits for
    gloo's own threads, then takes milliseconds, instead of as long as the longest wait. For waits that continue
    nevertheless see `GlooWaits`."""

    def __init__(self) -> None:
        self._before: set[Connection] = set()
        self._own: set[Connection] | None = None

    def begin(self) -> None:
        self._before, self._own = open_connections(), None

    def made(self) -> None:
        """From now on connections that are opened belong to others."""
        self._own = open_connections() - self._before

    def options(self) -> Any:
        return None

    def abort(self, groups: Sequence[dist.ProcessGroup], store: dist.Store | None) -> None:
        own, before = self._own, self._before
        port = None if store is None else _server_of(store).port

        def wanted(connection: Connection) -> bool:
            if own is not None:
                return connection in own
            return connection not in before or connection.there[1] == port

        break_connections(wanted)

    def drain(self) -> None:
        """Nothing to do: waits have ended with an error."""


class NcclAborter:
    """NCCL aborts communicators: their kernels end, and their results are meaningless. Without `wanted`, torch's
    default applies, in which its watchdog ends the process."""

    def __init__(self, device: torch.device, wanted: bool):
        self._device, self._wanted = device, wanted

    def begin(self) -> None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_OPERATIONS)
        if self._wanted:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = _REPORTED_ONLY
        else:
            os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)

    def made(self) -> None:
        """Nothing to do: communicators are found through their groups."""

    def options(self) -> Any:
        # High priority: a product that was started before must not keep all multiprocessors from a message that others
        # wait for. Also, torch takes such streams from another pool than those of copies
        # (`workers/snapshot/state_copy.py`).
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = MEETING_TIMEOUT  # torch warns if it differs from `timeout`
        if self._wanted:
            options.config.blocking = 0
        return options

    def abort(self, groups: Sequence[dist.ProcessGroup], store: dist.Store | None) -> None:
        if not self._wanted or not groups:
            return
        # Together: if two communicators wait for each other, aborting one alone would not finish.
        first: Any = groups[0]._get_backend(self._device)
        together = isinstance(first, dist.ProcessGroupNCCL)  # torch's second NCCL backend has no such bracket
        if together:
            first._group_start()
        for group in reversed(groups):
            group.abort()
        if together:
            first._group_end()

    def drain(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:  # a sticky error of the device
            raise DeviceLost(
                f"the GPU reports an error after communication was interrupted: {str(error).splitlines()[0]}"
            ) from error


class Regroup(Protocol):
    """Creates the groups of one generation after the other."""

    way: str
    """One word for people."""

    def make(self, store: dist.Store, rank: int, world: int, members: Members) -> Groups:
        """The group of all `world` ranks, as "world", and `members`; all their ranks are here. Raises RuntimeError."""
        ...

    def abort(self) -> None:
        """Called by any thread: threads that wait in groups, or make them, get an error; kernels on a device end."""
        ...

    def leave(self, all_ended: bool = True) -> None:
        """After `abort`: make sure that none of the groups' work is running; `make` may follow. `all_ended`:
        whether all aborted work has ended; the rest is abandoned. Raises DeviceLost."""
        ...

    def forget(self) -> None:
        """After `leave`, if no `make` follows."""
        ...


class NewGroups:
    """New groups in every generation."""

    way = "abort and new groups"

    def __init__(self, kind: str, aborter: GroupAborter):
        self._kind, self._aborter = kind, aborter
        self._groups: Groups = {}
        self._store: dist.Store | None = None

    def make(self, store: dist.Store, rank: int, world: int, members: Members) -> Groups:
        self._store = store
        self._aborter.begin()
        distributed_c10d._world.group_count = 0  # it is part of keys, and includes groups whose creation was aborted
        dist.init_process_group(
            self._kind,
            store=store,
            rank=rank,
            world_size=world,
            timeout=MEETING_TIMEOUT,
            pg_options=self._aborter.options(),
        )
        assert dist.group.WORLD is not None
        self._groups = {"world": dist.group.WORLD}
        for name, ranks in members.items():
            # Only the members meet, and order along the axis is the order of ranks.
            self._groups[name] = dist.new_group(
                list(ranks),
                timeout=MEETING_TIMEOUT,
                pg_options=self._aborter.options(),
                use_local_synchronization=True,
                group_desc=name,
            )
        for group in self._groups.values():
            group.set_timeout(COLLECTIVE_TIMEOUT)
        self._aborter.made()
        self._store = None
        return dict(self._groups)

    def abort(self) -> None:
        self._aborter.abort(list(self._groups.values()), self._store)

    def leave(self, all_ended: bool = True) -> None:
        groups, self._groups, self._store = list(self._groups.values()), {}, None
        _forget_all(self._kind, groups, all_ended)
        self._aborter.drain()

    def forget(self) -> None:
        """Nothing to do."""


class LastingGroups:
    """Groups that stay the same in every generation, with their members reconfigured: torch 2.14 and later.

    A group keeps using the store that it began with, so new groups are created if the store changes, and if anything
    goes wrong during creation.
    """

    way = "reconfigure"

    def __init__(self, kind: str, aborter: GroupAborter):
        self._kind, self._aborter = kind, aborter
        self._groups: Groups = {}
        self._store: dist.Store | None = None
        self._address: tuple[str, int] | None = None

    def make(self, store: dist.Store, rank: int, world: int, members: Members) -> Groups:
        server, everybody = _server_of(store), {"world": list(range(world)), **members}
        if self._address != (server.host, server.port):
            self.forget()
        self._store, self._address = store, (server.host, server.port)
        self._aborter.begin()
        try:
            if not self._groups:
                distributed_c10d._world.group_count = 0
                shared = dist.PrefixStore("lasting-groups", server)
                for name, ranks in everybody.items():
                    self._groups[name] = self._empty(name, shared, rank, ranks)
            for name, ranks in everybody.items():
                self._join(name, dist.PrefixStore(f"{name} of {ranks[0]}", store), ranks.index(rank), len(ranks))
        except BaseException:
            self._aborter.abort(list(self._groups.values()), store)
            self.forget()
            raise
        self._aborter.made()
        self._store = None
        return dict(self._groups)

    def _empty(self, name: str, store: dist.Store, rank: int, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group without any peers yet."""
        options: dict[str, Any] = {"enable_reconfigure": True}
        if name == "world":
            options |= {"pg_options": self._aborter.options(), "timeout": MEETING_TIMEOUT}
            dist.init_process_group(self._kind, store=store, rank=rank, world_size=len(ranks), **options)
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        options |= {"backend_options": self._aborter.options(), "timeout": MEETING_TIMEOUT, "group_desc": name}
        private: Any = distributed_c10d  # `new_group` calls this, but does not pass on the flag
        group: dist.ProcessGroup
        group, _ = private._new_process_group_helper(
            *(len(ranks), ranks.index(rank), list(ranks), self._kind, store, f"{name} of {ranks[0]}"), **options
        )
        distributed_c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
        return group

    def _join(self, name: str, store: dist.Store, index: int, size: int) -> None:
        """Make this rank and its peers, who do the same, members of the group, with consecutive numbers."""
        private: Any = distributed_c10d
        group = self._groups[name]
        store.set(f"handle/{index}", private._get_reconfigure_handle(group))
        if index == 0:
            store.set("uuid", str(secrets.randbits(62)))
        handles = [store.get(f"handle/{member}").decode() for member in range(size)]
        uuid = int(store.get("uuid"))
        private._reconfigure(uuid, handles, group, timeout=MEETING_TIMEOUT).wait()
        group.set_timeout(COLLECTIVE_TIMEOUT)

    def abort(self) -> None:
        self._aborter.abort(list(self._groups.values()), self._store)

    def leave(self, all_ended: bool = True) -> None:
        self._store = None
        if not all_ended:
            self._forget(all_ended)
        self._aborter.drain()

    def forget(self) -> None:
        self._forget(all_ended=True)

    def _forget(self, all_ended: bool) -> None:
        groups, self._groups, self._address = list(self._groups.values()), {}, None
        if groups:
            _forget_all(self._kind, groups, all_ended)


def regroup_for(device: torch.device, in_place: bool) -> Regroup:
    """The Regroup for ranks on `device`. `in_place`: whether its process should survive the loss of a peer."""
    lasting = in_place and hasattr(distributed_c10d, "_reconfigure")
    if device.type == "cpu":
        return LastingGroups("gloo", GlooAborter()) if lasting else NewGroups("gloo", GlooAborter())
    # In torch 2.14 only the second NCCL backend, which is not the default, accepts new members.
    lasting = lasting and nccl_is_the_second()
    aborter = NcclAborter(device, in_place)
    return LastingGroups("nccl", aborter) if lasting else NewGroups("nccl", aborter)


def _forget_all(kind: str, groups: list[dist.ProcessGroup], all_ended: bool) -> None:
    """Remove all that torch knows of `groups`, which were aborted. `all_ended`: whether their collectives have."""
    if dist.is_initialized():
        if kind == "nccl":
            distributed_c10d._abort_process_group()  # destroying it would wait for its peers
        else:
            dist.destroy_process_group()
    # A group's end waits for its threads, one of which may be in a collective that does not end.
    ending = threading.Thread(target=groups.clear, name="ends of groups", daemon=True)
    ending.start()
    if all_ended:
        ending.join(_END_SECONDS)


def _server_of(store: dist.Store) -> dist.TCPStore:
    """The client of the server behind `store`."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise TypeError(f"ranks of a gang meet through a TCPStore, not through a {type(store).__name__}")
    return store
