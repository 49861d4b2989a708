"""What the control plane, agents, node daemons and trainers say to each other. Pure Python.

All of it crosses process borders as JSON (`json_codec.py`). A `LaunchOrder` goes down: control plane -> agent ->
trainer. It carries the generation, by which a receiver refuses one that was replaced. What comes up is in
`reports.py`; the other classes here are what agents and daemons answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from workers.errors import MantaError
from workers.protocol.json_codec import JsonObject
from workers.system.ports import PortRange

PROTOCOL = 2
"""Version of all messages between processes. Raised by a change that the other end must know of."""
SPOKEN: tuple[int, ...] = (2,)
"""Protocols of processes of other releases that this one works with, and its own. One stays in here for as long as
ranks of both can meet in one generation; a process that speaks several answers in that of the other end."""
SAME_RELEASE = "run the same release of Manta on all nodes"


class ProtocolMismatch(MantaError):
    """Two processes of different releases cannot talk to each other."""

    def __init__(self, who: str, theirs: int, what_to_do: str = SAME_RELEASE):
        """`who`: the other end, in words; `theirs`: its protocol."""
        self.theirs = theirs
        ours = " and ".join(map(str, SPOKEN))
        super().__init__(f"{who} speaks protocol {theirs} and this process {ours}: {what_to_do}")


def check_protocol(who: str, theirs: int, what_to_do: str = SAME_RELEASE) -> None:
    """Raise ProtocolMismatch unless we speak the protocol of `who`, the other end in words."""
    if theirs not in SPOKEN:
        raise ProtocolMismatch(who, theirs, what_to_do)


@dataclass(frozen=True)
class Resume:
    """Where a gang's state comes from when its trainers start."""

    source: Literal["start", "snapshot", "memory", "checkpoint"] = "start"
    """start: fresh initialisation; snapshot: what the process still holds, else this rank's file in shared memory;
    memory: files in shared memory of another layout's ranks; checkpoint: a durable one."""
    step: int = 0
    """Committed step that the state belongs to; training continues with step + 1."""
    path: str | None = None
    """Folder of the durable checkpoint."""
    paths: tuple[str, ...] = ()
    """For memory: the other layout's snapshot files on this rank's node, together all of the state."""
    began: int = 0
    """The generation that began at step 0 and from which the state descends: what generations before it have saved is
    not superseded by it. 0: none is known."""


FaultKind = Literal["kill", "stop", "hang", "oom", "exception", "slow", "node", "store", "partition"]
FaultPhase = Literal[
    "data", "forward", "backward", "reduction", "optimizer", "snapshot", "checkpoint", "start", "recovery"
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
FAULT_PHASES: tuple[FaultPhase, ...] = get_args(FaultPhase)
BETWEEN_STEPS = ("start", "recovery")
"""Phases of the beginning of a generation, where the number of a step means nothing."""


FAULT_STRUCK = "fault_struck"
"""Type of the event with which a rank says, in its last words, that a fault strikes now."""


@dataclass(frozen=True)
class Fault:
    """One fault that is injected into one rank."""

    id: str
    """Names it in events."""
    kind: FaultKind
    """kill: SIGKILL to the rank's process; stop: SIGSTOP to it; hang: it never returns; oom: it allocates until it gets
    nothing more; exception: it raises; slow: from now on it sleeps in each step; node: all that runs on its node is
    killed; store: the job's rendezvous store on its node is killed; partition: its connections are cut."""
    rank: int
    """Global rank."""
    at_step: int = 0
    """First step in which it may strike; it means nothing for the phases start and recovery."""
    phase: FaultPhase = "data"
    """Where in the step; start: when the rank meets the others of its next generation, recovery: when it brings its
    state to the step from which that generation continues."""
    seconds: float = 0.0
    """slow: sleep in each step; partition: how long the rank does not get through to the others again."""
    delay: float = 0.0
    """kill, stop: seconds from the beginning of the phase, so that it strikes in the middle of it."""
    hold_gil: bool = False
    """hang: with the interpreter's lock held, so that no other thread of the process runs either."""

    @property
    def sentence(self) -> str:
        """For events and for people."""
        where = f"in {self.phase}" if self.phase in BETWEEN_STEPS else f"in {self.phase} of step {self.at_step}"
        return f"{self.kind} of rank {self.rank} {where} or as soon as possible after it"


@dataclass(frozen=True)
class TraceOrder:
    """Steps that all ranks of a job are to record."""

    number: int
    """The trace's, in its job."""
    generation: int
    """Whose ranks are meant."""
    steps: int
    """How many."""
    first_step: int = 0
    """None before this one; 0: as soon as possible."""
    profiler_ranks: tuple[int, ...] = ()
    """Ranks that run torch's profiler meanwhile; they get the order, too."""


@dataclass(frozen=True)
class LaunchOrder:
    """Everything that one trainer process needs to know to be rank `rank` of generation `generation`."""

    job: str
    """Job id; names files and shared memory."""
    generation: int
    """Number of this start of the gang, from 1; higher ones fence lower ones."""
    rank: int
    """Global rank, 0 to world size - 1."""
    spec: JsonObject
    """The checked JobSpec as JSON."""
    store_host: str | None = None
    """Host of the rendezvous store; None for a single process."""
    store_port: int | None = None
    """Port of the rendezvous store."""
    secret: str | None = field(default=None, repr=False)
    """What only the ranks of this generation know (`workers.comm.secret`); None for a single process."""
    snapshot_folder: str | None = None
    """Folder in the node's shared memory for this job's snapshots; None turns snapshots off."""
    memory_keeper: str | None = None
    """Socket of who holds snapshots outside of shared memory on the rank's node. Its agent fills that in."""
    checkpoint_folder: str | None = None
    """Folder for the job's durable checkpoints; None turns them off."""
    token_cache: str | None = None
    """Folder on the rank's node in which tokens of corpora are kept. Its agent fills that in."""
    resume: Resume = Resume()
    """Where state comes from."""
    device: str = "cpu"
    """Torch device of the rank: cpu, or cuda:0 (its one visible GPU)."""
    peak_flops: float | None = None
    """Peak FLOP/s of one rank's device, for MFU, of a CPU that of one thread; None: measured at start."""
    faults: tuple[Fault, ...] = ()
    """Faults that were asked for and have not struck yet."""
    roll_backs: tuple[JsonObject, ...] = ()
    """Data of the job's `rolled_back` events so far (`workers.numerics.bad_numbers.RollBack`): samples that they
    skipped stay skipped."""
    in_place: bool = False
    """Whether a trainer that loses a peer comes to rest and waits for the next order, instead of ending. One that was
    asked to rest between two steps does so anyway."""
    tries_repair: bool = False
    """Whether the ranks try repair in place before anything else, which a trainer then does as with `in_place`, if all
    of them could; else it ends when it loses a peer."""
    ports: PortRange | None = None
    """On which the rank listens for its peers; None: any. Its agent fills that in."""
    protocol: int = PROTOCOL
    """Of the control plane."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size, pipeline stages and replicas of the spec."""
        layout = self.spec.get("parallel") or {}
        return tuple(layout.get(axis, 1) for axis in ("tensor", "pipeline", "data"))


@dataclass(frozen=True)
class TrainerArgument:
    """What a trainer process is forked with."""

    order: LaunchOrder
    prepare: bool = False
    """Build what such an order needs, and wait for one that is to be carried out, instead of carrying this one out."""


@dataclass(frozen=True)
class Launched:
    """An agent's answer to a launch."""

    pid: int
    """Of the trainer."""
    kept: bool = False
    """Whether the trainer that was at rest continues, instead of a new one."""


@dataclass(frozen=True)
class AgentDescription:
    """Where a rank's agent is, and what runs under it."""

    host: str
    """Name of the machine."""
    address: str
    """IP address under which other nodes reach it."""
    pid: int
    """The agent's own."""
    node: str | None = None
    """Ray's id of the node; None outside of Ray."""
    trainer_pid: int | None = None
    """None while no trainer runs."""
    generation: int = 0
    """Of the last launch; 0 before the first."""
    group: str = ""
    """Name of the placement group that it is in."""
    devices: tuple[str, ...] = ()
    """GPUs of the rank, as CUDA_VISIBLE_DEVICES takes them."""
    rank: int | None = None
    """Of the last launch; None before the first."""
    sizes: tuple[int, ...] = ()
    """Its tensor-parallel size, pipeline stages and replicas."""
    cores: int = 0
    """Processors that it may keep busy; 0: one of a release that does not say."""
    owner_epoch: int = 0
    """Highest epoch of a control plane that has asked anything of it; 0: of none that has one."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot file of a job on an agent's node."""

    path: str
    rank: int
    """Whose state it holds."""
    layout: str
    """Tag of the layout."""
    is_backup: bool = False
    """Whether that rank lives on another node."""
    steps: tuple[int, ...] = ()
    """Committed steps that are whole in it."""


@dataclass(frozen=True)
class Endpoint:
    """A port of a host: where a server listens, or may."""

    host: str
    port: int


@dataclass(frozen=True)
class ListeningPorts:
    """Where a node's daemon takes connections for a moment, so that others can try whether they reach it."""

    host: str
    ports: tuple[int, ...]


@dataclass(frozen=True)
class ForkRequest:
    """What a zygote is asked for; the child's control socket, standard output and standard error come with it."""

    entry: str
    """Which of the zygote's functions the child runs."""
    argument: JsonObject
    """What that takes, as JSON."""
    environment: dict[str, str]
    """Additions to the zygote's own."""
    protocol: int = PROTOCOL
    """Of the requester."""


@dataclass(frozen=True)
class ForkAnswer:
    """What a zygote answers: first that the child runs, or why there is none; later how it ended."""

    pid: int | None = None
    code: int | None = None
    """Exit status of a child that has ended; None where a signal ended it."""
    signal: int | None = None
    error: str | None = None
    """Why there is no child."""
    protocol: int = PROTOCOL
    """Of the zygote."""


@dataclass(frozen=True)
class StoreArgument:
    """What the process of a rendezvous store is forked with."""

    host: str
    """Address to listen at."""
    ports: PortRange | None = None
    """On one of these; None: any."""


@dataclass(frozen=True)
class StorePort:
    """What that process answers once it serves."""

    port: int


@dataclass(frozen=True)
class PeakRate:
    """What the process that measures a device answers."""

    peak_flops: float
    """FLOP/s of it; of a CPU that of one thread."""
    source: str
    """See `workers.accounting.device_peak.Peak`."""


@dataclass(frozen=True)
class GpuReading:
    """What the driver says of one GPU; None: it does not say that."""

    index: int
    """The driver's, on its machine."""
    answers: bool = True
    """False: the driver does not reach it any more."""
    busy_ratio: float | None = None
    """Of the driver's last sample, the part of the time in which a kernel ran."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded that were corrected."""
    ecc_uncorrected: int | None = None
    """The same of those that were not."""
    xids: dict[str, int] = field(default_factory=dict)
    """Errors that the driver has reported since the daemon started, by their code (XID)."""
    clock_mhz: int | None = None
    """Of its multiprocessors, now."""


@dataclass(frozen=True)
class Heartbeat:
    """What a node's daemon says on every heartbeat."""

    node: str
    """Ray's id of the node."""
    draining: bool = False
    """Whether the node is being drained."""
    drain_seconds: float | None = None
    """How long it can still be counted on; None where that was not said."""
    drain_reason: str = ""
    """Why it is being drained, in words; empty where no reason was given."""
    stays: bool = False
    """Whether it was being drained, and is not any more."""
    gpus: tuple[GpuReading, ...] | None = None
    """The machine's GPUs; None: as was said on this connection before, or not known."""


@dataclass(frozen=True)
class NodeDescription:
    """A node, as its daemon sees it."""

    node: str
    """Ray's id of the node."""
    host: str
    """Name of the machine."""
    address: str
    """IP address under which other nodes reach it."""
    pid: int
    """The daemon's."""
    heartbeat_port: int
    """At `address`: where the daemon sends heartbeats from."""
    heartbeat_secret: str = ""
    """What a request for one has to contain."""
    zygote_pid: int | None = None
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    peak_flops: float | None = None
    """Peak FLOP/s of one thread on the CPU; None until measured, or when that failed."""
    unshared: tuple[str, ...] = ()
    """Folders of the service that this node does not share, though it should."""
    code: str = ""
    """Which code runs there (`workers/system/own_code.py`); empty in releases that do not say."""
    protocol: int = PROTOCOL
