"""What trainers and their agents report to the control plane. Pure Python.

A `Report` contains one payload, whose class says what it is about, and the generation: a report of an older generation
than the receiver's is refused. It is sent as JSON (`json_codec.py`), with the payload's kind as a string.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.liveness.progress import DeviceRecord, Phase, Record
from manta.workers.liveness.rank_samples import RankSample
from manta.workers.protocol.json_codec import JsonObject, MalformedMessage, from_json, to_json
from manta.workers.system.processes import ProcessState
from manta.workers.timing.recording import PackedRecording

REPAIR_SELF_TEST = "repair_self_test"
"""Type of the event by which rank 0 reports whether repair in place works where a job runs."""
EXIT_SAVED = 77
"""Exit status of a trainer that was asked to save its state and end before the job's last step, and has done so."""


@dataclass(frozen=True)
class Position:
    """The part of a trainer's progress record that leaves its node; fields as in `Record`."""

    pid: int
    generation: int
    phase: Phase
    step: int = 0
    micro_batch: int | None = None
    waits_for: int | None = None
    channel: int | None = None
    sending: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    committed: int = 0
    commits: int = 0
    heartbeat: int = 0
    torn: bool = False
    device: DeviceRecord | None = None

    @classmethod
    def of(cls, record: Record, device: DeviceRecord | None = None) -> Position:
        """From a record as it was read; `device`: how far its device is, as far as that can be believed."""
        names = (field.name for field in fields(cls) if field.name != "device")
        return cls(**{name: getattr(record, name) for name in names}, device=device)


@dataclass(frozen=True)
class ProcessUse:
    """What the kernel says about a process; see `ProcessState`."""

    state: str
    """The letter of its state."""
    cpu_seconds: float = 0.0
    starved: float = 0.0
    """Seconds in which its main thread was able to run and did not get a processor."""

    @classmethod
    def of(cls, process: ProcessState) -> ProcessUse:
        """From one look at a process."""
        return cls(process.letter, round(process.cpu_seconds, 2), round(process.delay_seconds, 2))


@dataclass(frozen=True)
class TrainerStatus:
    """Where a trainer stands, and for how long."""

    pid: int
    overdue: bool = False
    """Whether it has stood still for longer than it may."""
    stopped: bool = False
    """Whether a signal has stopped its process."""
    standing_seconds: float = 0.0
    """Since its last change."""
    burning: bool = False
    """Whether it used the processor most of that time."""
    record: Position | None = None
    """None before it has written its first."""
    process: ProcessUse | None = None


@dataclass(frozen=True)
class Prepared:
    """A trainer without an order is ready for one; only for its agent."""


@dataclass(frozen=True)
class Started:
    """The trainer has its state and begins to train."""

    pid: int
    connected_at: float | None = None
    """Unix time at which it had met the other ranks, in seconds."""
    step: int = 0
    """Committed step of its state."""


@dataclass(frozen=True)
class Metrics:
    """Numbers of committed steps."""

    rows: tuple[JsonObject, ...]
    """One object per step, with the names of the REST contract."""
    ranks: RankSample | None = None
    """Numbers of all ranks, every few seconds; those that cannot be sent at once are dropped."""


@dataclass(frozen=True)
class Event:
    """Something to tell the user."""

    type: str
    message: str = ""
    """One sentence."""
    step: int | None = None
    data: JsonObject = field(default_factory=dict)
    """With the names of the contract for that type."""


@dataclass(frozen=True)
class Printed:
    """Lines that a trainer printed, from a node that does not share the folder of the job's logs."""

    stream: str
    """stdout or stderr; agent for what its agent wrote."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class TraceBegan:
    """All ranks record their steps from now on; reported by rank 0."""

    number: int
    """Number of the trace within its job."""
    first_step: int


@dataclass(frozen=True)
class Traced:
    """What this rank has recorded for a trace."""

    number: int
    """Number of the trace within its job."""
    first_step: int
    recording: PackedRecording


@dataclass(frozen=True)
class Profiled:
    """Result of torch's profiler for a trace's steps on this rank; reported before what the rank has recorded."""

    number: int
    """Number of the trace within its job."""
    first_step: int
    content: str
    """A Chrome trace, compressed by gzip, in base 85."""


@dataclass(frozen=True)
class Resting:
    """The trainer has lost a peer, or was ordered to rest, and waits for the next generation's order."""

    step: int | None = None
    """Committed step whose state it holds; None if its state belongs to no step."""
    message: str = ""
    """Why it rests."""


@dataclass(frozen=True)
class Finished:
    """The last step is committed, and saved if that was requested."""

    step: int
    seconds: dict[str, float] | None = None
    """How the time since the last step was spent, by the ledger's names."""


@dataclass(frozen=True)
class Failure:
    """Why a trainer ends before its last step, as it reports to its agent."""

    kind: str
    """A key of `manta.workers.errors.FAILURE_KINDS`."""
    step: int
    """Step that was being computed (last committed + 1)."""
    exception: str
    """Class name."""
    message: str
    """One line."""
    traceback: str = ""
    """Python traceback."""
    at: float = 0.0
    """Unix time in seconds, added by the agent."""


@dataclass(frozen=True)
class KillReason:
    """Why an agent killed its trainer."""

    kind: str
    """hung, not_saved or straggler, or stopped: it did not come to rest, or its generation was over."""
    message: str


@dataclass(frozen=True)
class Exited:
    """The trainer's process is gone; reported by its agent, after all other reports."""

    code: int | None = None
    """Exit status; None if a signal ended it."""
    signal: int | None = None
    last_output: tuple[str, ...] = ()
    """Last lines of its standard error."""
    failure: Failure | None = None
    """The reason, if it reported one."""
    killed_for: KillReason | None = None
    """The reason, if its agent killed it."""
    memory_kills: int | None = None
    """If it was ended by a SIGKILL that its agent did not send: the number of processes of its machine that the kernel
    has killed for lack of memory since it began; None: not known."""


Payload = (
    Prepared
    | Started
    | Metrics
    | Event
    | Printed
    | TrainerStatus
    | FlightRecord
    | TraceBegan
    | Traced
    | Profiled
    | Resting
    | Finished
    | Failure
    | Exited
)


@dataclass(frozen=True)
class Message:
    """A payload that will become a report."""

    payload: Payload
    time: float
    """Unix time in seconds at which it was sent."""


PAYLOADS: dict[str, Any] = {
    "prepared": Prepared,
    "started": Started,
    "metrics": Metrics,
    "event": Event,
    "printed": Printed,
    "stalled": TrainerStatus,
    "flight_record": FlightRecord,
    "trace_began": TraceBegan,
    "traced": Traced,
    "profiled": Profiled,
    "resting": Resting,
    "finished": Finished,
    "failure": Failure,
    "exit": Exited,
}
"""By kind. A trainer's status is reported when it stands still for longer than allowed, and when it moves on after
that. The last report of a rank in a generation is `resting` or `exit`. `prepared`, `flight_record` and `failure` stay
with the agent, which puts the failure into the exit."""
_KINDS = {payload: kind for kind, payload in PAYLOADS.items()}
FROM_AGENTS = (Printed, TrainerStatus, Exited)
"""The payloads that agents make themselves; all others come from trainers."""


def kind_of(payload: Payload) -> str:
    """The kind under which a payload is sent."""
    return _KINDS[type(payload)]


def payload_of(kind: str, data: JsonObject) -> Payload:
    """The payload that was sent as `data`. Raises MalformedMessage."""
    if kind not in PAYLOADS:
        raise MalformedMessage(f"there are no reports of kind {kind!r}")
    payload: Payload = from_json(PAYLOADS[kind], data)
    return payload


@dataclass(frozen=True)
class Report:
    """One message of a trainer, or of its agent about it, to the control plane."""

    payload: Payload
    generation: int
    rank: int
    time: float
    """Unix time at which it was created, in seconds."""
    sequence: int = 0
    """Number assigned by the agent, from 1 upwards over all generations of this agent."""

    @property
    def kind(self) -> str:
        """The payload's kind."""
        return kind_of(self.payload)

    def to_json(self) -> JsonObject:
        """As a JSON object; `kind` says which class `data` has."""
        return {
            "kind": self.kind,
            "generation": self.generation,
            "rank": self.rank,
            "time": self.time,
            "sequence": self.sequence,
            "data": to_json(self.payload),
        }

    @classmethod
    def from_json(cls, document: JsonObject) -> Report:
        """From a JSON object made by `to_json`. Raises MalformedMessage."""
        envelope = from_json(_Envelope, document)
        payload = payload_of(envelope.kind, envelope.data)
        return cls(payload, envelope.generation, envelope.rank, envelope.time, envelope.sequence)


@dataclass(frozen=True)
class _Envelope:
    kind: str
    generation: int
    rank: int
    time: float
    sequence: int = 0
    data: JsonObject = field(default_factory=dict)
