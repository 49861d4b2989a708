"""Which rank waits for which at this moment, and what each rank does, in words: a pure function of what all agents
see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from service.recovery.hang_culprits import Group, Look, find_culprits, path_from, waits_of
from workers.comm.grid import AXES
from workers.liveness.progress import DeviceRecord
from workers.liveness.record_layout import CONNECTING_CHANNEL
from workers.protocol.reports import Position, TrainerStatus


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
    looks = [
        Look(rank, answered=rank not in silent) if answer is None else Look.of(rank, answer)
        for rank, answer in enumerate(answers)
    ]
    edges = waits_of(looks, group)
    ranks = tuple(_rank(rank, answer, rank in silent, edges.get(rank)) for rank, answer in enumerate(answers))
    verdict = find_culprits(looks, group)
    culprits = verdict.ranks if verdict.kind == "ranks" else ()
    if verdict.kind != "nobody":
        who = _names(culprits) if culprits else "no rank in particular"
        return Waits(ranks, culprits, f"the job stands still because of {who}: {verdict.why}")
    return Waits(ranks, (), _sentence(ranks, edges, verdict.why))


def _sentence(ranks: Sequence[WaitingRank], edges: dict[int, int], why: str) -> str:
    """For when no rank has stood still for longer than allowed."""
    if not edges:
        return "no rank waits for another one at this moment"
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
    doing = phase if place is None else _doing(place)
    if answer.stopped:
        doing += ", stopped by a signal"
    step = None if record is None else record.step
    return WaitingRank(rank, phase, doing, answer.standing_seconds, peers, step)


def _doing(place: Position | DeviceRecord) -> str:
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


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{' and more' if len(ranks) > 8 else ''}"
