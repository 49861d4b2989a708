"""Stands in for torch.distributed below `manta.workers.comm.process_groups`, and for what makes its groups
(`regroup.py`), for one rank whose peers are not there, and records what NCCL would have been asked to do
(`group_programs.py`).

Which communicator and which stream an operation gets is what torch's ProcessGroupNCCL does (torch 2.11 to 2.13, no
`device_id` bound): one communicator a group for collectives and for batches of messages, one a pair of ranks for single
messages, each with a stream of its own and made by the hosts of its ranks at its first use.

Results: a sum is this rank's part, a gathering repeats it, a message brings zeros. What all ranks sum up is finite, so
that they decide alike, but for the sums over which a test says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dispatch_mode import DispatchMode
from group_programs import Communicator, Meet, Message, Program, Start, Sum, Use, Wait

from manta.workers.comm import process_groups
from manta.workers.comm.comm import Comm
from manta.workers.comm.regroup import Members

_OF_COMMUNICATION = "workers/comm/"
_NORM_AT = 3
"""Of the squared norm in a step's agreement (`workers/parallel/data/agreement.py`)."""


@dataclass(frozen=True)
class Group:
    """A process group as its members see it."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class _Watched:
    """Memory of an operation that nothing has used since."""

    number: int
    tensor: torch.Tensor
    """Kept, so that the address means nothing else."""
    written: bool


def code_line() -> str:
    """The innermost line of the engine that runs now, outside of its communication where there is one."""
    frame, within = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        at = path.rfind("workers/")
        if at >= 0 and "/tests/" not in path:
            line = f"{path[at:]}:{frame.f_lineno}"
            if not path[at:].startswith(_OF_COMMUNICATION):
                return line
            within = within or line
        frame = frame.f_back
    return within or "outside of the engine"


class _Work:
    """An operation under way."""

    def __init__(self, recorder: Recorder, number: int):
        self._recorder, self._number = recorder, number

    def wait(self) -> bool:
        """The compute stream waits."""
        self._recorder.program.append(Wait(self._number, code_line()))
        return True

    def is_completed(self) -> bool:
        """Never before it was waited for, which asks most of whoever started it."""
        return False


class Recorder:
    """Of one rank of `world` ranks."""

    def __init__(self, rank: int, world: int, bad_agreements: Collection[int] = ()):
        """`bad_agreements`: of the fp64 sums over all ranks, from 0, those whose norm is not finite."""
        self.rank, self.program, self._bad_agreements = rank, Program(), bad_agreements
        self._agreements = 0
        self._world = Group("world", tuple(range(world)))
        self._communicators: set[Communicator] = set()
        self._operations = 0
        self._watched: dict[int, list[_Watched]] = {}
        self.label = ""
        """What a message that is started now carries."""

    # As `Regroup`.

    way = "recorded"

    def make(self, store: Any, rank: int, world: int, members: Members) -> dict[str, Group]:
        """The ranks meet, and then the members of each group, under a name that counts the groups which each has made
        before."""
        self.program.append(Meet("world", self._world.ranks, code_line()))
        groups = {"world": self._world}
        for number, (name, ranks) in enumerate(members.items(), start=1):
            groups[name] = Group(f"{name} (group {number})", tuple(ranks))
            self.program.append(Meet(groups[name].name, groups[name].ranks, code_line()))
        return groups

    def abort(self) -> None:
        """Nothing waits."""

    def leave(self, all_ended: bool = True) -> None:
        """Nothing more is recorded of them."""

    def forget(self) -> None:
        """The same."""

    # The names of torch.distributed.

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> _Work:
        """The tensor stays as it is."""
        largest = op == dist.ReduceOp.MAX
        if group == self._world and tensor.dtype == torch.float64 and not largest:
            self._agree(tensor)
        return self._collective(group, "all_reduce max" if largest else "all_reduce sum", tensor, tensor, tensor)

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, group: Any = None, **_: Any) -> _Work:
        """This rank's part in every place."""
        self._lies_apart_or_in_place(tensor, out, group)
        out.view(len((group or self._world).ranks), -1).copy_(tensor.reshape(1, -1).clone())
        return self._collective(group, "all_gather", tensor, out, tensor)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, group: Any = None, **_: Any) -> _Work:
        """This rank's part of what it has."""
        self._lies_apart_or_in_place(out, tensor, group)
        members = (group or self._world).ranks
        out.view(-1).copy_(tensor.reshape(len(members), -1)[members.index(self.rank)])
        return self._collective(group, "reduce_scatter", out, out, tensor)

    def _lies_apart_or_in_place(self, part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
        """What NCCL takes: a rank's part in other memory, or just where it is in the whole."""
        members = (group or self._world).ranks
        own = whole.view(len(members), -1)[members.index(self.rank)]
        one_storage = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert not (one_storage and _overlap(part, whole)) or _ends(part) == _ends(own), f"in place: {code_line()}"

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, **_: Any) -> _Work:
        """One message, on the communicator of the pair."""
        return self._message(group, Message(True, dst, _bytes(tensor), self.label), tensor)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None, **_: Any) -> _Work:
        """Zeros."""
        tensor.zero_()
        return self._message(group, Message(False, src, _bytes(tensor), self.label), tensor)

    def batch_isend_irecv(self, operations: list[Any]) -> list[_Work]:
        """All on the group's own communicator, as one."""
        messages, touched = [], []
        for each in operations:
            sends = each.op == self.isend
            if not sends:
                each.tensor.zero_()
            messages.append(Message(sends, each.peer, _bytes(each.tensor)))
            touched.append((each.tensor, not sends))
        return [self._started(_communicator_of(operations[0].group), tuple(messages), touched)]

    def _agree(self, sums: torch.Tensor) -> None:
        torch.nan_to_num_(sums, nan=1.0, posinf=1.0, neginf=1.0)
        if self._agreements in self._bad_agreements:
            sums[_NORM_AT] = float("inf")
        self._agreements += 1

    # What is recorded.

    def _message(self, group: Group, message: Message, tensor: torch.Tensor) -> _Work:
        pair = Communicator(group.name, tuple(sorted((self.rank, message.peer))))
        return self._started(pair, (message,), [(tensor, not message.sends)])

    def _collective(self, group: Any, kind: Any, part: torch.Tensor, out: torch.Tensor, given: torch.Tensor) -> _Work:
        # The two ends of a pipeline have the embedding at different places, and what is scattered may stay in place.
        group = group or self._world
        place = None if group.name.startswith("embedding") else _place(given if kind == "reduce_scatter" else out)
        what = Sum(kind, str(part.dtype).removeprefix("torch."), _bytes(part), place)
        touched = [(out, True)] if given is out else [(out, True), (given, False)]
        return self._started(_communicator_of(group), what, touched)

    def _started(self, on: Communicator, what: Any, touched: list[tuple[torch.Tensor, bool]]) -> _Work:
        line = code_line()
        if on not in self._communicators:
            self._communicators.add(on)
            self.program.append(Meet(f"communicator {on}", on.ranks, line))
        self._operations += 1
        for tensor, written in touched:
            # The operation itself touches it, too: whoever had it before must be through.
            self.note_use(tensor, written)
        self.program.append(Start(self._operations, on, what, line))
        for tensor, written in touched:
            key = tensor.untyped_storage().data_ptr()
            self._watched.setdefault(key, []).append(_Watched(self._operations, tensor.detach(), written))
        return _Work(self, self._operations)

    def note_use(self, tensor: torch.Tensor, writes: bool) -> None:
        """The compute stream touches `tensor`."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self._watched:
            return
        left = []
        for each in self._watched.pop(key):
            if (writes or each.written) and _overlap(each.tensor, tensor):
                self.program.append(Use(each.number, code_line()))
            else:
                left.append(each)
        if left:
            self._watched[key] = left


def _communicator_of(group: Group) -> Communicator:
    return Communicator(group.name, group.ranks)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.storage_offset() * tensor.element_size(), tensor.untyped_storage().nbytes()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one storage may have bytes in common: their ends, not their strides, are looked at."""
    (a, b), (c, d) = _ends(first), _ends(second)
    return a < d and c < b


def _ends(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


class _Uses(DispatchMode):
    """Tells a recorder which memory each kernel touches."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder._watched and not func.is_view:
            writes = _what_it_writes(func)
            for writing, value in zip(writes.values(), args, strict=False):
                self._note(value, writing)
            for name, value in kwargs.items():
                self._note(value, writes[name])
        return func(*args, **kwargs)

    def _note(self, value: Any, writes: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._recorder.note_use(value, writes)
        elif isinstance(value, list | tuple):
            for each in value:
                self._note(each, writes)


@cache
def _what_it_writes(func: Any) -> dict[str, bool]:
    """Which of its arguments a kernel writes to, in their order."""
    aliases = {each.name: each.alias_info for each in func._schema.arguments}
    return {name: alias is not None and alias.is_write for name, alias in aliases.items()}


_NAMES = ("all_reduce", "isend", "irecv", "batch_isend_irecv")


@dataclass(frozen=True)
class _Operation:
    """In the place of P2POp, which looks its group up."""

    op: Any
    tensor: torch.Tensor
    peer: int
    group: Group


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the block, process groups are those of `recorder`, and what torch computes is told to it."""
    stand_ins = {name: getattr(recorder, name) for name in _NAMES}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(dist, **stand_ins, P2POp=_Operation))
        for name in ("all_gather_single", "reduce_scatter_single"):
            stack.enter_context(mock.patch.object(process_groups, name, getattr(recorder, name)))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_: None))
        stack.enter_context(_Uses(recorder))
        yield


def labelled(comm: Comm, recorder: Recorder) -> None:
    """Have the recorder know of each message which micro-batch it carries, and in which direction."""
    phase = comm.step.phase

    def named(name: Any, micro_batch: int = -1, stage: int = -1) -> Any:
        kind = str(name).removeprefix("send_").removeprefix("receive_")
        recorder.label = f"{kind} of micro-batch {micro_batch}" if micro_batch >= 0 else ""
        return phase(name, micro_batch, stage)

    comm.step.phase = named  # type: ignore[method-assign]
