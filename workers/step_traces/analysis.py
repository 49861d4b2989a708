"""What follows from a trace: how each second of a rank's steps was spent, the bubble, and the critical path.

The bubble is where a rank neither computes nor communicates because of the pipeline: it waits for messages of its
neighbours, and after its last pass, in whatever comes next, for the passes of its replica's other stages. If a backend
does not distinguish waiting from transferring, all of a communication counts as waiting.

The critical path is the chain of slices backwards from the end of the last traced step. On a rank it goes from what
ended last to what came before. If the rank waited for another one, for its message or for it to join a collective, the
path continues there, at the moment at which that rank began the communication.

Trace and results become the JSON document that people and browsers read; docs/tracing.md describes it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manta.workers.comm.grid import AXES
from manta.workers.step_traces.assembly import StepTrace, TracedRank, nested, parents
from manta.workers.timing.recording import Slice


def idle_slices(trace: StepTrace, rank: TracedRank) -> Iterator[tuple[Slice, float]]:
    """The communications in which `rank` waits because of the pipeline, and for how many seconds each."""
    if trace.grid.pipeline == 1:
        return
    for slices, own, whole in zip(rank.by_step, rank.pass_ends, trace.replica_pass_ends(rank.rank), strict=False):
        for each in slices:
            waited = each.end - each.start if each.wait is None else each.wait
            if each.kind == "receive":
                yield each, waited
            elif each.kind == "collective" and each.start >= own:
                yield each, max(0.0, min(each.start + waited, whole) - each.start)


def bubble(trace: StepTrace, rank: TracedRank) -> float:
    """Fraction of its steps that `rank` waits because of the pipeline."""
    return sum(seconds for _, seconds in idle_slices(trace, rank)) / rank.seconds if rank.steps else 0.0


def own_seconds(slices: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...], float]]:
    """Each slice, the slices around it, the outermost first, and the seconds of it that are in no slice within it."""
    known = list(slices)
    own = [each.end - each.start for each in known]
    for each, parent in zip(known, parents(known), strict=True):
        if parent is not None:
            own[parent] -= each.end - each.start
    for (each, around), seconds in zip(nested(known), own, strict=True):
        yield each, around, max(0.0, seconds)


Place = tuple[int, int]
"""A rank, and the index of one of its slices."""


def critical_path(trace: StepTrace) -> list[Place]:
    """The chain, the last slice first. Empty if nothing was recorded."""
    last = trace.end
    if last is None:
        return []
    meetings, lanes = _Meetings(trace), {each.rank: _Lane(each) for each in trace.ranks}
    rank, now = last.rank, last.steps[-1].end
    path: dict[Place, None] = {}
    waits: set[Place] = set()
    while (wait := _last_binding(meetings, lanes[rank], now, waits)) is not None:
        index, other, start = wait
        path |= dict.fromkeys((rank, each) for each in lanes[rank].between(lanes[rank].slices[index].end, now))
        path[rank, index] = None
        waits.add((rank, index))
        rank, now = other, min(start, now)
    path |= dict.fromkeys((rank, each) for each in lanes[rank].between(-1.0, now))
    return list(path)


def _last_binding(meetings: _Meetings, lane: _Lane, now: float, seen: set[Place]) -> tuple[int, int, float] | None:
    """The last communication before `now` in which the lane's rank was held up: its index, the rank that held it up,
    and when that rank began it."""
    for index in lane.waits_before(now):
        held_up = meetings.blocked_by(lane.rank, lane.slices[index])
        if held_up is not None and (lane.rank, index) not in seen:
            return index, *held_up
    return None


class _Lane:
    """The slices of one rank, for searching backwards."""

    def __init__(self, rank: TracedRank):
        self.rank, self.slices = rank.rank, rank.slices
        self._by_end = sorted(range(len(rank.slices)), key=lambda index: rank.slices[index].end)
        self._starts = [each.start for each in rank.slices]
        self._parents = list(parents(rank.slices))
        self._ends = [rank.slices[index].end for index in self._by_end]
        self._waits = [index for index in self._by_end if rank.slices[index].kind in ("receive", "collective")]
        self._wait_ends = [rank.slices[index].end for index in self._waits]

    def waits_before(self, now: float) -> Iterator[int]:
        """Communications that were over by `now`, the last one first."""
        return (self._waits[at] for at in range(bisect_right(self._wait_ends, now) - 1, -1, -1))

    def between(self, since: float, now: float) -> Iterator[int]:
        """Slices in which something happens between the two moments, the ones that end last first."""
        around: int | None = bisect_left(self._starts, now) - 1
        while around is not None and around >= 0:  # whatever continues at that time contains the slice that began last
            if self.slices[around].end > now:
                yield around
            around = self._parents[around]
        for at in range(bisect_right(self._ends, now) - 1, -1, -1):
            if self._ends[at] <= since:
                return
            yield self._by_end[at]


class _Meetings:
    """Who began each communication, and when."""

    def __init__(self, trace: StepTrace):
        self._grid = trace.grid
        self._sent: dict[tuple[int, int, int], float] = {}
        """When a message was sent, by sender, receiver and number."""
        self._last: dict[tuple[str, int, int], list[tuple[float, int]]] = {}
        """The two ranks that joined a collective last, last one first; by axis, first rank of the group, and number."""
        for rank in trace.ranks:
            for each in rank.slices:
                if each.kind == "send" and each.peer is not None and each.number is not None:
                    self._sent[rank.rank, each.peer, each.number] = _start_of(each)
                elif each.kind == "collective" and (key := self._key(rank.rank, each)) is not None:
                    arrivals = [*self._last.get(key, []), (_start_of(each), rank.rank)]
                    self._last[key] = sorted(arrivals, reverse=True)[:2]

    def _key(self, rank: int, each: Slice) -> tuple[str, int, int] | None:
        axis = next((axis for axis in AXES if axis == each.axis), None)
        if axis is None or each.number is None:
            return None
        return axis, self._grid.group(axis, rank)[0], each.number

    def blocked_by(self, rank: int, each: Slice) -> tuple[int, float] | None:
        """The rank, if any, that `rank` waited for, since it began the communication later; and when it did."""
        if each.kind == "receive":
            if each.peer is None or each.number is None:
                return None
            sent = self._sent.get((each.peer, rank, each.number))
            return (each.peer, sent) if sent is not None and sent > each.start else None
        key = self._key(rank, each)
        others = [(start, other) for start, other in self._last.get(key, ()) if other != rank] if key else []
        if not others or others[0][0] <= each.start:
            return None
        return others[0][1], others[0][0]


def _start_of(each: Slice) -> float:
    return each.start if each.issued is None else each.issued


_WORDS = {
    "loader": "loader",
    "backward_input": "backward (inputs)",
    "backward_weight": "backward (weights)",
    "gather": "parameter gather",
}
"""Names of kinds that differ from the kind itself."""


def name_of(each: Slice) -> str:
    """What a slice is, in a few words."""
    match each.kind:
        case "collective":
            return f"{each.operation or 'collective'} ({each.axis})"
        case "send":
            return f"send to rank {each.peer}"
        case "receive":
            return f"receive from rank {each.peer}"
    word = _WORDS.get(each.kind, each.kind)
    return word if each.micro_batch is None else f"{word} {each.micro_batch}"


def slice_document(each: Slice) -> dict[str, Any]:
    """One slice."""
    return {
        "kind": each.kind,
        "name": name_of(each),
        "start": round(each.start, 7),
        "end": round(each.end, 7),
        "step": each.step,
        "stage": each.stage,
        "micro_batch": each.micro_batch,
        "bytes": each.bytes,
        "axis": each.axis,
        "wait": None if each.wait is None else round(each.wait, 7),
    }


def rank_documents(trace: StepTrace, nodes: Mapping[int, str | None]) -> list[dict[str, Any]]:
    """The ranks, with everything that each did. `nodes`: the node of each rank."""
    return [_rank_document(trace, rank, nodes.get(rank.rank)) for rank in trace.ranks]


def _rank_document(trace: StepTrace, rank: TracedRank, node: str | None) -> dict[str, Any]:
    at = trace.grid.coordinates(rank.rank)
    return {
        "rank": rank.rank,
        "tensor": at.tensor,
        "pipeline": at.pipeline,
        "data": at.data,
        "context": at.context,
        "node": node,
        "steps": [{"step": step.step, "start": round(step.start, 7), "end": round(step.end, 7)} for step in rank.steps],
        "slices": [slice_document(each) for each in rank.slices],
    }


def analysis_document(trace: StepTrace) -> dict[str, Any]:
    """Results computed from the slices."""
    bubbles = {each.rank: bubble(trace, each) for each in trace.ranks if each.steps}
    return {
        "clock": {"error_seconds": trace.error_seconds, "device": trace.device},
        "bubble": {
            "mean": sum(bubbles.values()) / len(bubbles) if bubbles else None,
            "ranks": [{"rank": rank, "fraction": fraction} for rank, fraction in bubbles.items()],
        },
        "critical_path": [list(place) for place in critical_path(trace)],
    }
