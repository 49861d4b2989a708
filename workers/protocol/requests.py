"""Requests to the ranks of a job, as values: what the control plane asks of agents and agents of their trainers, and
what a trainer remembers of it until all ranks have agreed to act. Pure Python.

Each is sent as JSON with the word that names its class. An agent passes a `RankRequest` on to its trainer unread, so a
new one is a class here, its word in `COMMANDS`, and the place in the trainer that acts on it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from manta.workers.protocol.json_codec import JsonObject, MalformedMessage, from_json, to_json
from manta.workers.protocol.messages import Fault, LaunchOrder, TraceOrder

C = TypeVar("C", bound="Command")


class Command:
    """A request to one trainer."""

    def to_json(self) -> JsonObject:
        """As a JSON object; `do` says which class it is."""
        return {"do": _WORDS[type(self)], **to_json(self)}

    @classmethod
    def from_json(cls: type[C], document: Any) -> C:
        """A command of this class or a subclass, made by `to_json`. Raises MalformedMessage."""
        kind = COMMANDS.get(str(document.get("do"))) if isinstance(document, dict) else None
        if kind is None or not issubclass(kind, cls):
            raise MalformedMessage(f"{document!r:.80} is not a {cls.__name__}")
        return from_json(kind, document)


class RankRequest(Command):
    """A request that an agent passes on to its trainer."""

    for_all: ClassVar[bool] = False
    """Whether an agent takes it from every control plane, not only from the one that owns the job."""

    @property
    def of_generation(self) -> int | None:
        """The only generation whose trainers take it; None: any trainer does."""
        return None


@dataclass(frozen=True)
class Go(Command):
    """Leave rest and carry out an order."""

    order: LaunchOrder


@dataclass(frozen=True)
class Rest(Command):
    """Leave a generation and come to rest."""

    generation: int
    after_step: bool = False
    """Only after the present step."""


@dataclass(frozen=True)
class DumpFlightRecord(Command):
    """Report the contents of NCCL's flight recorder."""


@dataclass(frozen=True)
class SaveAndEnd(RankRequest):
    """Save the state after a step, together with all other ranks of the generation, and exit. One rank is enough."""

    generation: int

    @property
    def of_generation(self) -> int:
        return self.generation


@dataclass(frozen=True)
class RecordSteps(RankRequest):
    """Have all ranks of the generation record steps. Rank 0 is told, and ranks that are to be profiled."""

    order: TraceOrder

    @property
    def of_generation(self) -> int:
        return self.order.generation


@dataclass(frozen=True)
class Arm(RankRequest):
    """Carry out a fault when its step and phase are reached."""

    fault: Fault
    for_all: ClassVar[bool] = True


COMMANDS: dict[str, type[Command]] = {
    "go": Go,
    "rest": Rest,
    "tell_flight": DumpFlightRecord,
    "save_and_end": SaveAndEnd,
    "trace": RecordSteps,
    "fault": Arm,
}
"""By the word that they are sent with."""
_WORDS = {command: word for word, command in COMMANDS.items()}


@dataclass(frozen=True)
class Asked:
    """What the ranks were asked for, or are doing: numbers, since a step's agreement sums them over all ranks."""

    end: int = 0
    """Ranks that were asked to save and end. If there is one, all do so after the step."""
    rest: int = 0
    """Ranks that were asked to leave the generation. If there is one, all do so after the step."""
    saving: int = 0
    """Ranks that are writing a checkpoint."""
    trace: int = 0
    """Number of the trace that begins with the next step, which rank 0 alone says; 0: none begins."""
    traced_steps: int = 0
    """Number of steps of that trace."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Asked:
        """From all fields in their order, perhaps summed over ranks."""
        return cls(*map(int, numbers))


NOTHING_ASKED = Asked()
ASKED_LENGTH = len(fields(Asked))
"""How many numbers an `Asked` has."""


class Requests:
    """What one rank was asked for, through its generations. Any thread adds to it; the training thread reads it."""

    def __init__(self) -> None:
        self.saving = False
        """Whether this rank is writing a checkpoint."""
        self.traces = TraceOrders()
        self._last_to_rest = self._last_to_end = -1

    def add(self, request: Command) -> None:
        """Remember a request that all ranks carry out after the same step."""
        match request:
            case Rest(generation):
                self._last_to_rest = max(self._last_to_rest, generation)
            case SaveAndEnd(generation):
                self._last_to_end = max(self._last_to_end, generation)
            case RecordSteps(order):
                self.traces.add(order)

    def of(self, generation: int, next_step: int | None = None) -> Asked:
        """What is asked of this rank in `generation`. `next_step`: the step with which a trace may begin; None: this
        rank begins none."""
        trace = None if next_step is None else self.traces.due(generation, next_step)
        return Asked(
            end=int(generation <= self._last_to_end),
            rest=int(generation <= self._last_to_rest),
            saving=int(self.saving),
            trace=0 if trace is None else trace.number,
            traced_steps=0 if trace is None else trace.steps,
        )


class TraceOrders:
    """Requested traces that have not begun."""

    def __init__(self) -> None:
        self._waiting: dict[int, TraceOrder] = {}
        self._started: set[tuple[int, int]] = set()
        self._late: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def add(self, order: TraceOrder) -> None:
        """Want a trace, unless it has begun or is wanted already: a control plane that takes over asks again."""
        with self._lock:
            if (order.generation, order.number) not in self._started:
                self._waiting[order.number] = order
            else:
                self._late |= {(order.number, rank) for rank in order.profiler_ranks}

    def is_late(self, number: int, rank: int) -> bool:
        """Whether an order to profile `rank` for that trace came after it had begun."""
        return (number, rank) in self._late

    def due(self, generation: int, step: int) -> TraceOrder | None:
        """The first order of this generation that may begin with `step`, if any; earlier generations' are forgotten."""
        if not self._waiting:
            return None
        with self._lock:
            self._waiting = {number: each for number, each in self._waiting.items() if each.generation >= generation}
            ready = [
                each for each in self._waiting.values() if each.generation == generation and each.first_step <= step
            ]
        return min(ready, key=lambda each: each.number, default=None)

    def take(self, generation: int, number: int) -> TraceOrder | None:
        """The recording of that trace begins; returns its order, None if this rank has none."""
        with self._lock:
            self._started.add((generation, number))
            return self._waiting.pop(number, None)
