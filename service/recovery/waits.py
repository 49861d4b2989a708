"""Which rank waits for which, and which one makes a job stand still: pure functions of what all agents see of their
ranks.

Ranks that wait name the rank that they wait for, so their answers form a graph, and the culprit is where its paths end:
a rank that waits for no other, or whose process is stopped, and that has stood still for longer than its own agent
allows.

With NCCL it is the devices that wait, and for a single peer only if that sends or takes a message. A device that waits
in a collective waits for the peer whose device was ready for the fewest collectives along that axis. If all were ready
and the collective does not end, the cause is the network or NCCL, and no rank's fault, unless NCCL's own records show
ranks that disagree (`find_disagreement`). If the backend reports nothing, a rank counts as waiting for every peer that
has entered fewer of the collectives that they share: the culprit did not enter the one in which the others wait.

NCCL's flight recorders know what each host has queued, with shapes and types, which no mark on a device shows: that two
ranks call different operations, or the same with different sizes. They do not know how far a device is with its work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from manta.workers.comm.grid import AXES, Axis
from manta.workers.liveness.flight_record import FlightOperation, FlightRecord, FlightSequence
from manta.workers.liveness.progress import CONNECTING_CHANNEL, DeviceRecord
from manta.workers.protocol.reports import Position, TrainerStatus

Group = Callable[[Any, int], Sequence[int]]
"""Ranks that share an axis with a rank: (axis, rank) -> ranks."""
_AXES = {"pipeline_up": "pipeline", "pipeline_down": "pipeline"}
"""Axes of groups whose names differ from their axes'."""


@dataclass(frozen=True)
class RankView:
    """One rank as its agent sees it."""

    rank: int
    answered: bool = True
    """Whether its agent answered at all."""
    overdue: bool = False
    """Whether it has stood still for longer than its agent allows."""
    stopped: bool = False
    """Whether its process is stopped by a signal."""
    waits_for: int | None = None
    """Rank without which it cannot continue."""
    step: int = 0
    """The current step."""
    counts: Mapping[str, int] | None = None
    """By axis, the number of collectives entered, or of those that its device was ready for."""
    heartbeat: int | None = None
    """Increases with every change."""
    on_device: bool = False
    """Whether it is known how far its device is."""
    waits_in: tuple[Axis, int] | None = None
    """Axis and number of the collective that its device waits for."""

    @classmethod
    def of(cls, rank: int, status: TrainerStatus | None) -> RankView:
        """From an agent's answer to `progress`; None: it did not answer."""
        if status is None:
            return cls(rank, answered=False)
        record = status.record
        if record is None:
            return cls(rank, overdue=status.overdue, stopped=status.stopped)
        view = cls(
            rank,
            overdue=status.overdue,
            stopped=status.stopped,
            waits_for=record.waits_for,
            step=record.step,
            counts=_of_all_axes(record.counts),
            heartbeat=record.heartbeat,
        )
        return view if record.device is None else view._with_device(record.device)

    def _with_device(self, device: DeviceRecord) -> RankView:
        known = replace(self, on_device=True, counts=_of_all_axes(device.counts), waits_for=None)
        if not device.fresh or device.channel is None:
            return known  # the wait seen in the last view may be over
        if device.waits_for is not None:
            return replace(known, waits_for=device.waits_for)
        return replace(known, waits_in=(AXES[device.channel], device.number))


@dataclass(frozen=True)
class Verdict:
    """Who is at fault."""

    kind: Literal["nobody", "ranks", "gang"]
    """nobody: nothing stands still that should not, or it may still continue; ranks: these are at fault; gang:
    something stands still and no rank can be named, so all are restarted."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault; all ranks for `gang`."""
    why: str = ""
    """For people."""


def find_culprits(views: Sequence[RankView], group: Group) -> Verdict:
    """Which ranks block the job, according to one view of each rank, in the order of ranks."""
    overdue = [view for view in views if view.overdue]
    if not overdue:
        return Verdict("nobody")
    edges = waits_of(views, group)
    roots: set[int] = set()
    cycles: list[list[int]] = []
    for view in overdue:
        path = path_from(view.rank, edges)
        if path[-1] in path[:-1]:
            cycles.append(path[path.index(path[-1]) : -1])
        else:
            roots.add(path[-1])
    stuck = {root for root in roots if views[root].waits_in is not None and not views[root].stopped}
    guilty = sorted(root for root in roots - stuck if views[root].overdue or not views[root].answered)
    if guilty:
        return _culprit_among_roots(views, guilty, set(edges.values()))
    if able := sorted(root for root in roots if not views[root].overdue):
        return Verdict("nobody", why=f"{_names(able)} may still continue")
    if stuck:
        return Verdict("gang", tuple(view.rank for view in views), _unended(views, min(stuck)))
    return _least_advanced(views, sorted({rank for cycle in cycles for rank in cycle}), "they wait for each other")


def waiting_for(views: Sequence[RankView], culprit: int, group: Group) -> list[int]:
    """Ranks that cannot continue without `culprit`, directly or through others."""
    edges = waits_of(views, group)
    return [view.rank for view in views if view.rank != culprit and culprit in path_from(view.rank, edges)]


def _of_all_axes(counts: Mapping[str, int]) -> Mapping[str, int]:
    """`counts` with zeros for the axes that an agent of an earlier release does not know."""
    return {**dict.fromkeys(AXES, 0), **counts}


def waits_of(views: Sequence[RankView], group: Group) -> dict[int, int]:
    """From each rank that waits to the one that it waits for, as far as known."""
    known = {view.rank: view.waits_for for view in views if view.waits_for is not None and not view.stopped}
    known |= _edges_of_devices(views, group)
    if known or any(view.on_device for view in views):
        return known
    last = {axis: _last_of_groups(axis, views, group) for axis in AXES}
    return {
        view.rank: to
        for view in views
        if view.overdue and (to := _furthest_lagging_peer(view, views, last)) is not None
    }


def _edges_of_devices(views: Sequence[RankView], group: Group) -> dict[int, int]:
    """From each rank whose device waits in a collective to the peer that is furthest behind, if one has not reached the
    collective; otherwise to a peer whose agent does not answer."""
    waiting = {view.rank: view.waits_in for view in views if view.waits_in is not None and not view.stopped}
    axes = {axis for axis, _ in waiting.values()}
    last = {axis: _last_of_groups(axis, views, group) for axis in axes}
    silent = [view.rank for view in views if not view.answered]
    neighbours = {axis: {peer: rank for rank in silent for peer in group(axis, rank)} for axis in axes}
    edges = {}
    for rank, (axis, number) in waiting.items():
        peer = last[axis][rank]
        counts = views[peer].counts
        if peer != rank and counts is not None and counts[axis] < number:
            edges[rank] = peer
        elif rank in neighbours[axis]:
            edges[rank] = neighbours[axis][rank]
    return edges


def _last_of_groups(axis: Axis, views: Sequence[RankView], group: Group) -> dict[int, int]:
    """By rank, which member of its group along `axis` has entered the fewest collectives there; each group is visited
    once, since `world` has as many members as there are ranks."""
    last: dict[int, int] = {}
    for view in views:
        if view.rank not in last:
            members = group(axis, view.rank)
            counted = [(counts[axis], peer) for peer in members if (counts := views[peer].counts) is not None]
            last |= dict.fromkeys([view.rank, *members], min(counted)[1] if counted else view.rank)
    return last


def _furthest_lagging_peer(
    view: RankView, views: Sequence[RankView], last: Mapping[Axis, Mapping[int, int]]
) -> int | None:
    """The peer that is furthest behind `view` in the collectives that they share."""
    if view.counts is None or view.stopped:
        return None
    lags = []
    for axis in AXES:
        peer = last[axis][view.rank]
        its = views[peer].counts
        if peer != view.rank and its is not None and its[axis] < view.counts[axis]:
            lags.append((view.counts[axis] - its[axis], -peer))
    return -max(lags)[1] if lags else None


def path_from(start: int, edges: Mapping[int, int]) -> list[int]:
    """From `start` along the edges to the end; if they form a cycle, the last one repeats an earlier one."""
    path, passed = [start], set[int]()
    while path[-1] in edges and path[-1] not in passed:
        passed.add(path[-1])
        path.append(edges[path[-1]])
    return path


def _culprit_among_roots(views: Sequence[RankView], guilty: list[int], awaited: set[int]) -> Verdict:
    sure = [rank for rank in guilty if views[rank].stopped or rank in awaited]
    if sure or len(guilty) == 1:
        ranks = tuple(sure or guilty)
        return Verdict("ranks", ranks, _reason(views[ranks[0]], bool(sure)))
    return _least_advanced(views, guilty, "none of them waits for another")


def _unended(views: Sequence[RankView], rank: int) -> str:
    axis, number = views[rank].waits_in or ("world", 0)
    return (
        f"all that share collective {number} along {axis} with rank {rank} have reached it, and it does not complete: "
        "the network or NCCL is at fault, not a rank"
    )


def _reason(view: RankView, awaited: bool) -> str:
    if not view.answered:
        return "others wait for it, and its agent does not answer"
    if view.stopped:
        return "its process is stopped"
    return "others wait for it, and it waits for no rank" if awaited else "it makes no progress and waits for no rank"


def _least_advanced(views: Sequence[RankView], ranks: list[int], why: str) -> Verdict:
    """The single rank of `ranks` with the least progress; the whole gang if there is no single one."""
    progress = {rank: (views[rank].step, (views[rank].counts or {}).get("world", 0)) for rank in ranks}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    if len(last) == 1:
        return Verdict("ranks", tuple(last), f"of {_names(ranks)} it got least far, and {why}")
    everybody = tuple(view.rank for view in views)
    return Verdict(
        "gang", everybody, f"{_names(last)} make no progress and {why}; which of them is at fault is not known"
    )


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{' and more' if len(ranks) > 8 else ''}"


@dataclass(frozen=True)
class WaitingRank:
    """The position of one rank."""

    rank: int
    phase: str
    """The phase in its record, or the phase of its device if that is behind; unknown if its agent does not answer."""
    doing: str
    """What the rank is doing, in words, with the communication that it waits in."""
    since_seconds: float | None
    """How long nothing has changed."""
    waits_for: tuple[int, ...]
    """Ranks without which it cannot continue, as far as known."""
    step: int | None
    """The current step."""


@dataclass(frozen=True)
class Waits:
    """Which rank waits for which."""

    ranks: tuple[WaitingRank, ...]
    culprits: tuple[int, ...]
    """Ranks that block the others and have stood still for longer than allowed."""
    sentence: str
    """A sentence about it for people."""


def waits_now(answers: Sequence[TrainerStatus | None], silent: frozenset[int], group: Group) -> Waits:
    """From the answers of all ranks' agents, in the order of ranks; None: no trainer runs there. `silent`: ranks whose
    agents do not answer; `group`: ranks that share an axis with a rank."""
    views = [
        RankView(rank, answered=rank not in silent) if answer is None else RankView.of(rank, answer)
        for rank, answer in enumerate(answers)
    ]
    edges = waits_of(views, group)
    ranks = tuple(_rank(rank, answer, rank in silent, edges.get(rank)) for rank, answer in enumerate(answers))
    verdict = find_culprits(views, group)
    culprits = verdict.ranks if verdict.kind == "ranks" else ()
    if verdict.kind != "nobody":
        who = _names(culprits) if culprits else "no rank in particular"
        return Waits(ranks, culprits, f"the job is stuck because of {who}: {verdict.why}")
    return Waits(ranks, (), _sentence(ranks, edges, verdict.why))


def _sentence(ranks: Sequence[WaitingRank], edges: dict[int, int], why: str) -> str:
    """For when no rank has stood still for longer than allowed."""
    if not edges:
        return "no rank is waiting for another one"
    ends = [path_from(rank, edges)[-1] for rank in edges]
    counts = Counter(ends)
    last = max(sorted(counts), key=counts.__getitem__)
    count = f"{len(edges)} of {len(ranks)} ranks {'waits' if len(edges) == 1 else 'wait'}"
    tail = f"; {why}" if why else ""
    if last in edges:  # they wait for each other, as during a collective
        return f"{count} for each other, as ranks do in a communication that is under way{tail}"
    all_of_them = "" if counts[last] == len(ends) else "most of them "
    return f"{count}, {all_of_them}in the end for rank {last}, which is in {ranks[last].doing}{tail}"


def _rank(rank: int, answer: TrainerStatus | None, silent: bool, waits_for: int | None) -> WaitingRank:
    peers = () if waits_for is None else (waits_for,)
    if answer is None:
        doing = "unknown: its agent does not answer" if silent else "nothing: no trainer runs"
        return WaitingRank(rank, "unknown" if silent else "exited", doing, None, peers, None)
    record = answer.record
    place = record.device if record is not None and record.device is not None and record.device.pending else record
    phase = "starting" if place is None else place.phase
    doing = phase if place is None else _describe_activity(place)
    if answer.stopped:
        doing += ", stopped by a signal"
    step = None if record is None else record.step
    return WaitingRank(rank, phase, doing, answer.standing_seconds, peers, step)


def _describe_activity(place: Position | DeviceRecord) -> str:
    """Phase, micro-batch and communication, in words."""
    words: str = place.phase
    if place.micro_batch is not None:
        words += f" of micro-batch {place.micro_batch}"
    peer, channel = place.waits_for, place.channel
    if channel == CONNECTING_CHANNEL:
        return f"{words}, waiting for {_peer(peer)} to connect"
    if channel is None or channel >= len(AXES):
        return words if peer is None else f"{words}, waiting for rank {peer}"
    if AXES[channel] == "pipeline":
        what = "take its message" if place.sending else "send a message"
        return f"{words}, waiting for {_peer(peer)} to {what}"
    return f"{words}, in a collective along {AXES[channel]}, waiting for {_peer(peer)}"


def _peer(rank: int | None) -> str:
    return "its peers" if rank is None else f"rank {rank}"


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
    return Verdict("ranks" if disagreement.ranks else "gang", disagreement.ranks or verdict.ranks, disagreement.why)


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
