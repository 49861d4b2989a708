"""What NCCL's flight recorders of all ranks say together: which rank did not arrive, or called something different. A
pure function.

They know what each host has queued, with shapes and types, which no mark on a device shows: that two ranks call
different operations, or the same with different sizes. They do not know how far a device is with its own work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manta.service.recovery.waits import Group, Verdict
from manta.workers.liveness.flight_record import FlightOperation, FlightRecord, FlightSequence

_AXES = {"pipeline_up": "pipeline", "pipeline_down": "pipeline"}
"""Axes of groups whose names differ from their axes'."""


@dataclass(frozen=True)
class Finding:
    """Ranks at fault, and why."""

    ranks: tuple[int, ...]
    why: str


def refined(verdict: Verdict, records: Mapping[int, FlightRecord], group: Group) -> Verdict:
    """`verdict`; if that names no rank, the result of `records` (by rank, of those that answered). `group`: ranks that
    share an axis with a rank."""
    if verdict.kind != "gang":
        return verdict
    disagreement = find_disagreement(records, group)
    if disagreement is None:
        return verdict
    if not disagreement.ranks:
        return Verdict("gang", verdict.ranks, disagreement.why)
    return Verdict("ranks", disagreement.ranks, disagreement.why)


def find_disagreement(records: Mapping[int, FlightRecord], group: Group) -> Finding | None:
    """Ranks that called something different from their peers; otherwise those that did not arrive where others wait,
    and wait for nobody themselves. None if all arrived at the same call; no rank is named if two sides are equally
    large. Nothing is known about ranks whose record is empty, since their recorder may be off."""
    records = {rank: record for rank, record in records.items() if record.sequences}
    instances = list(_instances(records, group))
    for instance in instances:
        difference = instance.difference()
        if difference is not None:
            return difference
    waits: dict[int, set[int]] = defaultdict(set)
    why: dict[int, str] = {}
    for instance in instances:
        absent, reason = instance.absent()
        for rank in instance.open if absent else ():
            waits[rank].update(absent)
        why |= {rank: reason for rank in absent if rank not in why}
    for rank, absent_rank, reason in _unanswered_messages(records, group):
        waits[rank].add(absent_rank)
        why.setdefault(absent_rank, reason)
    culprits = tuple(sorted(rank for rank in why if not waits.get(rank)))
    return Finding(culprits, why[culprits[0]]) if culprits else None


@dataclass(frozen=True)
class _Instance:
    """One sequence on the members of one group."""

    name: str
    sequences: Mapping[int, FlightSequence | None]
    """By member that answered; None for one that has queued nothing of it, as far as known."""
    sure: Mapping[int, bool]
    """Whether a member's record is complete."""

    @property
    def open(self) -> dict[int, FlightOperation]:
        """The first unfinished operation of each member that has one."""
        return {rank: each.open for rank, each in self.sequences.items() if each is not None and each.open is not None}

    def absent(self) -> tuple[list[int], str]:
        """Members that have not queued the first operation that any other member is in, and a sentence about it."""
        if not self.open:
            return [], ""
        first = min(self.open.values(), key=lambda operation: operation.number)
        absent = [rank for rank in self.sequences if self._last(rank, first.number) < first.number]
        return absent, f"did not come to {first.kind} {first.number} of {self.name} ({first.sizes}), where others wait"

    def _last(self, rank: int, otherwise: int) -> int:
        sequence = self.sequences[rank]
        if sequence is not None:
            return sequence.last
        return 0 if self.sure[rank] else otherwise

    def difference(self) -> Finding | None:
        """Members that called something different, at the first operation that is not finished for all."""
        if not self.open:
            return None
        number = min(operation.number for operation in self.open.values())
        calls = {
            rank: operation
            for rank, sequence in self.sequences.items()
            for operation in (sequence.operations if sequence is not None else ())
            if operation.number == number
        }
        for what in ("kind", "sizes"):
            minority = _minority({rank: getattr(operation, what) for rank, operation in calls.items()})
            if minority is not None:
                ranks, theirs, others = minority
                return Finding(ranks, f"at number {number} of {self.name} {theirs} meets {others}")
        return None


def _minority(calls: Mapping[int, str]) -> tuple[tuple[int, ...], str, str] | None:
    """The ranks that differ from the majority, what they call, and what the majority calls; None if all call the same.
    If two calls are equally frequent it is not known which is right: no ranks."""
    common = Counter(calls.values()).most_common(2)
    if len(common) < 2:
        return None
    (usual, often), (other, less) = common
    ranks = tuple(sorted(rank for rank, said in calls.items() if said != usual)) if often > less else ()
    return ranks, other, usual


def _instances(records: Mapping[int, FlightRecord], group: Group) -> Iterator[_Instance]:
    """Each sequence of collectives or batches on each of its groups; each group is visited once."""
    by_name: dict[tuple[str, str], dict[int, FlightSequence]] = defaultdict(dict)
    for rank, record in records.items():
        for sequence in record.sequences:
            if sequence.what != "messages":
                by_name[sequence.group, sequence.what][rank] = sequence
    for (name, _), sequences in sorted(by_name.items()):
        seen: set[int] = set()
        for rank in sequences:
            if rank not in seen:
                members = [member for member in _members(name, rank, group) if member in records]
                seen.update(members)
                sure = {member: records[member].whole for member in members}
                yield _Instance(name, {member: sequences.get(member) for member in members}, sure)


def _members(name: str, rank: int, group: Group) -> Sequence[int]:
    axis: Any = _AXES.get(name, name)
    return group(axis, rank)


def _unanswered_messages(records: Mapping[int, FlightRecord], group: Group) -> Iterator[tuple[int, int, str]]:
    """(Rank, peer, why the peer is at fault) for each message that a rank waits for and its peer has not begun."""
    open_messages: dict[tuple[str, int, int, str], FlightOperation] = {}
    for rank, record in records.items():
        for sequence in record.sequences:
            if sequence.what == "messages":
                members = _members(sequence.group, rank, group)
                for operation in reversed(sequence.operations):
                    if operation.peer is not None and operation.peer < len(members):
                        open_messages[sequence.group, rank, members[operation.peer], operation.kind] = operation
    for (name, rank, peer, kind), operation in open_messages.items():
        other = "recv" if kind == "send" else "send"
        if peer in records and (name, peer, rank, other) not in open_messages:
            yield rank, peer, f"has not begun its {other} of {name} ({operation.sizes}) for which rank {rank} waits"
