"""What NCCL's flight recorder, which torch keeps in each process, says about one rank's communications.

torch writes a rank's last operations as JSON (`_dump_nccl_trace_json`, format 2.10 of torch 2.13 and 2.14; the other
format is a pickle, which would be executed when read). From that this keeps what is needed to compare two ranks: for
each group the last numbers, and the operations around the first unfinished one. Pure Python.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

BEFORE, AFTER = 4, 12
"""Operations kept of a sequence: this many before the first unfinished one, and this many from it on."""
_BATCH = "coalesced"
_WORLD = "default_pg"


@dataclass(frozen=True)
class FlightOperation:
    """One communication that the host has queued."""

    number: int
    """Number within its sequence; of a message, within all messages of its group on this rank."""
    kind: str
    """torch's name: all_reduce, send ..."""
    sizes: str
    """Shapes and types of inputs and outputs; of a message, of the message only."""
    state: str
    """scheduled, started or completed, according to its events. Without TORCH_NCCL_ENABLE_TIMING none is ever
    `started`."""
    peer: int | None = None
    """Of a message: the other rank's index in the group."""

    @property
    def over(self) -> bool:
        """Whether the device has finished it."""
        return self.state == "completed"


@dataclass(frozen=True)
class FlightSequence:
    """Operations of one group that all members begin in the same order."""

    group: str
    """The group's name, "world" for the group of all ranks."""
    what: Literal["collectives", "batches", "messages"]
    """batches: several messages begun as one; messages: single ones."""
    last: int
    """Number of the last operation that the host has queued."""
    operations: tuple[FlightOperation, ...]
    """The operations that were kept, in order; of messages all unfinished ones."""

    @property
    def open(self) -> FlightOperation | None:
        """The first unfinished operation; None if all are finished."""
        return next((operation for operation in self.operations if not operation.over), None)


@dataclass(frozen=True)
class FlightRecord:
    """The communications that one rank has begun in this generation."""

    sequences: tuple[FlightSequence, ...] = ()
    whole: bool = True
    """Whether nothing was forgotten; otherwise a missing sequence may have existed."""


def read_flight_record(dump: bytes | str) -> FlightRecord:
    """Parse torch's JSON. Raises ValueError if it is not a dump."""
    try:
        entries = json.loads(dump).get("entries", [])
        by_sequence = _by_sequence(entries)
        sequences = tuple(_sequence(group, what, each) for (group, what), each in sorted(by_sequence.items()))
        return FlightRecord(sequences, not entries or entries[0]["record_id"] == 0)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the flight recorder's dump is not of a format that is known: {error!r}") from error


def _by_sequence(entries: list[Mapping[str, Any]]) -> dict[tuple[str, Any], list[FlightOperation]]:
    """The operations by sequence, of the newest group of each name: other groups belong to earlier generations."""
    # Groups of the second NCCL backend may live through several generations, in which new members count from 1.
    entries = [entry for entry in entries if not str(entry["profiling_name"]).startswith("nccl2:")]
    newest: dict[str, int] = {}
    for entry in entries:
        name = entry["process_group"][1]
        newest[name] = max(newest.get(name, 0), entry["pg_id"])
    batches = {_batch(entry) for entry in entries if _kind(entry) == _BATCH}
    sequences = defaultdict(list)
    for entry in entries:
        name = entry["process_group"][1]
        # The parts of a batch have no events: they would look as if they never finished.
        if entry["pg_id"] == newest[name] and (_kind(entry) == _BATCH or _batch(entry) not in batches):
            what = "collectives" if not entry["is_p2p"] else "batches" if _kind(entry) == _BATCH else "messages"
            sequences["world" if name == _WORLD else name, what].append(_operation(entry))
    return sequences


def _kind(entry: Mapping[str, Any]) -> str:
    """`all_reduce` of "nccl:all_reduce", `send` of "nccl:send 0->1"."""
    return str(entry["profiling_name"]).partition(":")[2].partition(" ")[0]


def _batch(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    is_p2p = bool(entry["is_p2p"])
    return entry["pg_id"], is_p2p, entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]


def _operation(entry: Mapping[str, Any]) -> FlightOperation:
    kind, peer = _kind(entry), None
    given, taken = (_tensors(entry, "input"), _tensors(entry, "output"))
    sizes = f"{given} -> {taken}"
    if kind in ("send", "recv"):
        ends = str(entry["profiling_name"]).partition(" ")[2]
        peer, sizes = int(ends.rpartition("->" if kind == "send" else "<-")[2]), given or taken
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    # Gloo has no events: what it has retired is finished.
    retired = bool(entry["retired"]) and str(entry["profiling_name"]).startswith("gloo:")
    return FlightOperation(int(number), kind, sizes, "completed" if retired else str(entry["state"]), peer)


def _tensors(entry: Mapping[str, Any], side: str) -> str:
    pairs = zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=False)
    return ", ".join(f"{dtype}{list(sizes)}" for dtype, sizes in pairs)


def _sequence(group: str, what: Any, operations: list[FlightOperation]) -> FlightSequence:
    last = max(operation.number for operation in operations)
    if what == "messages":
        nearby = [operation for operation in operations if not operation.over][: BEFORE + AFTER]
    else:
        first = next((at for at, operation in enumerate(operations) if not operation.over), len(operations))
        nearby = operations[max(0, first - BEFORE) : first + AFTER]
    return FlightSequence(group, what, last, tuple(nearby))
