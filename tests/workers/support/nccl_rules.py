"""Replays the programs of all ranks under NCCL's rules, and names what would hang, or bring wrong bytes.

1. Operations of a communicator run one after the other on each rank, in the order in which they were started there.
2. The n-th collective of a communicator is the same one on all its ranks: kind, type, bytes.
3. Single messages of a communicator meet in order, a send a receive of as many bytes. A send is over when its receive
   runs (rendezvous); what is small NCCL buffers, which no program may rely on.
4. An operation begins after what the compute stream was given before it: what that waits for, it waits for.
5. Hosts that make a group or a communicator wait for each other, and start nothing meanwhile.
6. The device's queues are limited, and streams share them (CUDA_DEVICE_MAX_CONNECTIONS): what is started behind an
   operation that cannot begin may have to wait for it, whatever stream it is on. At the worst there is one queue, in
   which all of a rank's streams begin what they are given in the order in which the host gave it: then a rank is a
   list of which nothing begins before everything in front of it has. With more queues, or longer ones, less waits for
   less; so a program that passes here passes there, and this one case is replayed.

And beside what NCCL sees: what meets comes from the same line of our code and lies at the same place of a flat buffer,
a message carries the same micro-batch for both, and memory of an operation is waited for before it is used, in the end
in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from group_programs import Communicator, Entry, Meet, Message, Program, Start, Sum, Use, Wait

Kind = Literal["mismatch", "deadlock", "not waited for", "too many kernels"]


@dataclass(frozen=True)
class Finding:
    """What is wrong, with the lines of code that do not fit each other."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


def findings(programs: list[Program], kernels_at_once: int | None = None) -> list[Finding]:
    """All that is wrong with the programs of ranks 0, 1, ...; `kernels_at_once`: operations that a device runs at the
    same time at most; None: any number."""
    mistakes = [finding for rank, program in enumerate(programs) for finding in _unwaited(rank, program)]
    mistakes += _mismatches(programs)
    deadlock = Replay(programs, kernels_at_once).run()
    return mistakes if deadlock is None else [*mistakes, deadlock]


def _unwaited(rank: int, program: Program) -> Iterator[Finding]:
    """Operations whose memory is used, or that are left, before anything has waited for them."""
    under_way: dict[int, Start] = {}
    for entry in program:
        if isinstance(entry, Start):
            under_way[entry.number] = entry
        elif isinstance(entry, Wait):
            under_way.pop(entry.number, None)
        elif isinstance(entry, Use) and entry.number in under_way:
            start = under_way.pop(entry.number)
            sentence = f"rank {rank} uses memory at {entry.line} of {_of(start)} without a wait between them"
            yield Finding("not waited for", (rank,), sentence, (start.line, entry.line))
    for start in under_way.values():
        sentence = f"rank {rank} never waits for {_of(start)}"
        yield Finding("not waited for", (rank,), sentence, (start.line, _last_line(program)))


def _mismatches(programs: list[Program]) -> Iterator[Finding]:
    """Operations that meet and do not fit each other."""
    for on, by_rank in _by_communicator(programs).items():
        first = on.ranks[0]
        if any(each and isinstance(each[0].what, tuple) for each in by_rank.values()) and _all_messages(by_rank):
            continue
        for rank in on.ranks[1:]:
            yield from _differing(on, first, by_rank[first], rank, by_rank[rank], programs)
    yield from _ill_matched_messages(programs)


def _all_messages(by_rank: dict[int, list[Start]]) -> bool:
    return all(isinstance(start.what, tuple) for starts in by_rank.values() for start in starts)


def _by_communicator(programs: list[Program]) -> dict[Communicator, dict[int, list[Start]]]:
    by_communicator: dict[Communicator, dict[int, list[Start]]] = {}
    for rank, program in enumerate(programs):
        for entry in program:
            if isinstance(entry, Start):
                places = by_communicator.setdefault(entry.on, {each: [] for each in entry.on.ranks})
                places[rank].append(entry)
    return by_communicator


def _differing(
    on: Communicator, first: int, ours: list[Start], rank: int, theirs: list[Start], programs: list[Program]
) -> Iterator[Finding]:
    """The first place at which two ranks of a communicator do not do the same."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not _fits(one, other):
            sentence = f"as number {place} on {on} rank {first} does {_at(one)} and rank {rank} {_at(other)}"
            yield Finding("mismatch", (first, rank), sentence, (one.line, other.line))
            return
    if len(ours) != len(theirs):
        (more, who), less = ((ours, first), rank) if len(ours) > len(theirs) else ((theirs, rank), first)
        extra, last = more[min(len(ours), len(theirs))], _last_line(programs[less])
        sentence = f"rank {who} does {_at(extra)} on {on}; rank {less} does not up to its end at {last}"
        yield Finding("mismatch", (who, less), sentence, (extra.line, last))


def _fits(one: Start, other: Start) -> bool:
    if isinstance(one.what, Sum):
        return one.what == other.what and one.line == other.line
    return not isinstance(other.what, Sum)  # messages of a batch are looked at pair by pair


def _ill_matched_messages(programs: list[Program]) -> Iterator[Finding]:
    """Ends of messages that do not fit each other, the first of each pair of ranks and direction."""
    ends: dict[tuple[Communicator, int, int], tuple[list[_End], list[_End]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(programs):
        for entry in program:
            if isinstance(entry, Start) and not isinstance(entry.what, Sum):
                for message in entry.what:
                    source, to = (rank, message.peer) if message.sends else (message.peer, rank)
                    ends[entry.on, source, to][0 if message.sends else 1].append((message, entry.line))
    for (on, source, to), (sent, received) in ends.items():
        for (send, line), (receive, other_line) in zip(sent, received, strict=False):
            if (send.bytes, send.label) != (receive.bytes, receive.label):
                sentence = f"on {on} rank {source} does {send} at {line}, and rank {to} {receive} at {other_line}"
                yield Finding("mismatch", (source, to), sentence, (line, other_line))
                break
        if len(sent) != len(received):
            rank, less = (source, to) if len(sent) > len(received) else (to, source)
            message, line = max(sent, received, key=len)[min(len(sent), len(received))]
            last = _last_line(programs[less])
            sentence = f"rank {rank} does {message} on {on} at {line}, without another end up to {last}"
            yield Finding("mismatch", (rank, less), sentence, (line, last))


_End = tuple[Message, str]


@dataclass
class _Running:
    """An operation that a rank's device has begun."""

    start: Start
    place: int
    """Its place among those of the communicator on this rank."""


class Replay:
    """The ranks' devices, each with one queue, and what they have begun."""

    def __init__(self, programs: list[Program], kernels_at_once: int | None = None):
        self._programs, self._kernels_at_once = programs, kernels_at_once
        self._next = [0] * len(programs)
        self._running: list[dict[int, _Running]] = [{} for _ in programs]
        self._begun: dict[tuple[int, Communicator], int] = defaultdict(int)
        self._under_way: dict[tuple[int, Communicator], int] = {}
        """The operation of a communicator that a rank has begun and not ended."""
        self._messages: dict[tuple[Communicator, int, int, bool], int] = defaultdict(int)
        """Ends of messages that were begun: by source, target, and whether it is the sending one."""
        self._ends_of: dict[tuple[int, int], list[tuple[tuple[Communicator, int, int, bool], int]]] = {}
        self._met: dict[str, set[int]] = defaultdict(set)
        self.most_at_once = 0
        """Operations that some device ran at the same time."""

    def run(self) -> Finding | None:
        """To the end of all ranks; or what keeps them from it."""
        ready = list(range(len(self._programs)))
        while ready:
            moved = [rank for rank in ready if self._advance(rank)]
            ready = list(range(len(self._programs))) if moved else []
        stuck = [rank for rank in range(len(self._programs)) if self._entry(rank) is not None]
        return self._deadlock(stuck) if stuck else None

    def _entry(self, rank: int) -> Entry | None:
        at = self._next[rank]
        return self._programs[rank][at] if at < len(self._programs[rank]) else None

    def _advance(self, rank: int) -> bool:
        """Begin all that a rank can; whether that was anything."""
        before = self._next[rank]
        while (entry := self._entry(rank)) is not None and self._passes(rank, entry):
            self._next[rank] += 1
        return self._next[rank] > before

    def _passes(self, rank: int, entry: Entry) -> bool:
        if isinstance(entry, Start):
            return self._begins(rank, entry)
        if isinstance(entry, Wait):
            return self._is_over(rank, entry.number)
        if isinstance(entry, Meet):
            self._met[entry.name + str(entry.ranks)].add(rank)
            return self._met[entry.name + str(entry.ranks)] >= set(entry.ranks)
        return True  # a use

    def _begins(self, rank: int, start: Start) -> bool:
        under_way = self._under_way.get((rank, start.on))
        if under_way is not None and not self._is_over(rank, under_way):
            return False
        running = self._running[rank]
        for number in list(running):
            self._is_over(rank, number)  # which lets go of it
        if self._kernels_at_once is not None and len(running) >= self._kernels_at_once:
            return False
        running[start.number] = _Running(start, self._begun[rank, start.on])
        self._begun[rank, start.on] += 1
        self._under_way[rank, start.on] = start.number
        self.most_at_once = max(self.most_at_once, len(running))
        if not isinstance(start.what, Sum):
            self._ends_of[rank, start.number] = [self._begin_end(rank, start.on, each) for each in start.what]
        return True

    def _begin_end(
        self, rank: int, on: Communicator, message: Message
    ) -> tuple[tuple[Communicator, int, int, bool], int]:
        """Begin one end of a message: (the other end's counter, how far that must have come)."""
        source, to = (rank, message.peer) if message.sends else (message.peer, rank)
        self._messages[on, source, to, message.sends] += 1
        return (on, source, to, not message.sends), self._messages[on, source, to, message.sends]

    def _is_over(self, rank: int, number: int) -> bool:
        running = self._running[rank].get(number)
        if running is None:
            return True
        over = not self._missing(rank, running)
        if over:
            del self._running[rank][number]
        return over

    def _missing(self, rank: int, running: _Running) -> list[int]:
        """The ranks that an operation waits for."""
        start = running.start
        if isinstance(start.what, Sum):
            return [peer for peer in start.on.ranks if self._begun[peer, start.on] <= running.place]
        ends = self._ends_of[rank, start.number]
        missing = [
            (other[2] if other[1] == rank else other[1]) for other, count in ends if self._messages[other] < count
        ]
        return list(dict.fromkeys(missing))

    def _blocking(self, rank: int) -> tuple[str, list[int]]:
        """Why a rank does not get on, and whom it waits for."""
        entry = self._entry(rank)
        if entry is None:
            return f"rank {rank} is at its end, {_last_line(self._programs[rank])}", []
        if isinstance(entry, Meet):
            missing = [each for each in entry.ranks if each not in self._met[entry.name + str(entry.ranks)]]
            return f"rank {rank} makes {entry.name} at {entry.line}", missing
        if isinstance(entry, Wait):
            running = self._running[rank][entry.number]
            return f"rank {rank} waits at {entry.line} for {_of(running.start)}", self._missing(rank, running)
        assert isinstance(entry, Start)
        before = self._under_way.get((rank, entry.on))
        if before is not None and before in self._running[rank]:
            running = self._running[rank][before]
            text = f"rank {rank} cannot begin {_at(entry)} before {_of(running.start)} is over"
            return text, self._missing(rank, running)
        each = next(iter(self._running[rank].values()))
        return f"rank {rank} has no room for {_at(entry)} beside {len(self._running[rank])} others", self._missing(
            rank, each
        )

    def _deadlock(self, stuck: list[int]) -> Finding:
        """Follow who waits for whom, up to the first one that is met again or that has ended."""
        chain, rank = [], stuck[0]
        while rank not in chain:
            chain.append(rank)
            waits_for = self._blocking(rank)[1]
            if not waits_for:
                break
            rank = waits_for[0]
        circle = chain[chain.index(rank) :]
        if len(circle) == 1 and len(chain) > 1:
            circle = chain[-2:]
        texts = [self._blocking(each)[0] for each in circle]
        lines = tuple(_line_at(self._programs[each], self._next[each]) for each in circle)
        return Finding("deadlock", tuple(circle), "; ".join(texts), lines)


def _line_at(program: Program, at: int) -> str:
    return program[at].line if at < len(program) else _last_line(program)


def _last_line(program: Program) -> str:
    return program[-1].line if program else "nowhere"


def _at(start: Start) -> str:
    return f"{start.text} at {start.line}"


def _of(start: Start) -> str:
    return f"{start.text} on {start.on}, which it starts at {start.line}"


def least_kernels_at_once(programs: list[Program]) -> int:
    """How many operations a device must be able to run at the same time for the programs to come to their end."""
    replay = Replay(programs)
    replay.run()
    return next(
        (count for count in range(1, replay.most_at_once) if Replay(programs, count).run() is None),
        replay.most_at_once,
    )
