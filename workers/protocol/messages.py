"""Messages between the control plane, agents, node daemons and trainers. Pure Python.

All of them are sent between processes as JSON (`json_codec.py`). A `LaunchOrder` goes down: control plane -> agent ->
trainer. It contains the generation, by which a receiver refuses an order that was replaced. What goes up is in
`reports.py`; the other classes here are the answers of agents and daemons.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.system.sockets import PortRange

PROTOCOL = 2
"""Version of all messages between processes. It is increased by a change that the other end must know of."""
SPOKEN: tuple[int, ...] = (2,)
"""Protocols of other releases' processes that this release works with, and its own. A protocol stays in this set as
long as ranks of both can meet in one generation; a process that speaks several answers in that of the other end."""
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
    """start: fresh initialisation; snapshot: the process's own copy if it still has one, otherwise this rank's file in
    shared memory; memory: files in shared memory of another layout's ranks; checkpoint: a durable one."""
    step: int = 0
    """Committed step of the state; training continues with step + 1."""
    path: str | None = None
    """Folder of the durable checkpoint."""
    paths: tuple[str, ...] = ()
    """For memory: the other layout's snapshot files on this rank's node, which together contain the whole state."""
    began: int = 0
    """The generation that began at step 0 and from which the state descends: it does not supersede what earlier
    generations have saved. 0: not known."""


FaultKind = Literal["kill", "stop", "hang", "oom", "exception", "slow", "node", "store", "partition"]
FaultPhase = Literal[
    "data", "forward", "backward", "reduction", "optimizer", "snapshot", "checkpoint", "start", "recovery"
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
FAULT_PHASES: tuple[FaultPhase, ...] = get_args(FaultPhase)
BETWEEN_STEPS = ("start", "recovery")
"""Phases at the beginning of a generation, in which a step number has no meaning."""


FAULT_STRUCK = "fault_struck"
"""Type of the event by which a rank reports, as its last message, that a fault is about to occur."""


@dataclass(frozen=True)
class Fault:
    """One fault that is injected into one rank."""

    id: str
    """Identifies it in events."""
    kind: FaultKind
    """kill: SIGKILL to the rank's process; stop: SIGSTOP to it; hang: it never returns; oom: it allocates until it gets
    no more memory; exception: it raises; slow: from now on it sleeps in each step; node: everything that runs on its
    node is killed; store: the job's rendezvous store on its node is killed; partition: its connections are cut."""
    rank: int
    """Global rank."""
    at_step: int = 0
    """First step in which it may occur; without meaning for the phases start and recovery."""
    phase: FaultPhase = "data"
    """Where in the step; start: when the rank meets the others of its next generation, recovery: when it brings its
    state to the step from which that generation continues."""
    seconds: float = 0.0
    """slow: sleep in each step; partition: how long the rank cannot reach the others again."""
    delay: float = 0.0
    """kill, stop: seconds from the beginning of the phase, so that it occurs in the middle of it."""
    hold_gil: bool = False
    """hang: while holding the interpreter's lock, so that no other thread of the process runs either."""

    @property
    def sentence(self) -> str:
        """For events and for people."""
        where = f"at {self.phase}" if self.phase in BETWEEN_STEPS else f"in step {self.at_step} ({self.phase})"
        return f"{self.kind} of rank {self.rank} {where}, or as soon as possible after it"


@dataclass(frozen=True)
class TraceOrder:
    """Steps that all ranks of a job are to record."""

    number: int
    """Number of the trace within its job."""
    generation: int
    """The generation whose ranks are meant."""
    steps: int
    """Number of steps."""
    first_step: int = 0
    """No step before this one is recorded; 0: as soon as possible."""
    profiler_ranks: tuple[int, ...] = ()
    """Ranks that also run torch's profiler; they get the order, too."""


@dataclass(frozen=True)
class LaunchOrder:
    """Everything that one trainer process needs to know to be rank `rank` of generation `generation`."""

    job: str
    """Job id; part of the names of files and shared memory."""
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
    """Known only to the ranks of this generation (`manta.workers.comm.secret`); None for a single process."""
    snapshot_folder: str | None = None
    """Folder in the node's shared memory for this job's snapshots; None turns snapshots off."""
    memory_keeper: str | None = None
    """Socket of the process that holds snapshots outside of shared memory on the rank's node. Filled in by its
    agent."""
    checkpoint_folder: str | None = None
    """Folder for the job's durable checkpoints; None turns them off."""
    token_cache: str | None = None
    """Folder on the rank's node in which tokens of corpora are stored. Filled in by its agent."""
    resume: Resume = Resume()
    """Where the state comes from."""
    cause: str = ""
    """Why the generation begins, in words; empty for a job's first one."""
    device: str = "cpu"
    """Torch device of the rank: cpu, or cuda:0 (its one visible GPU)."""
    peak_flops: float | None = None
    """Peak FLOP/s of one rank's device, for MFU; of a CPU, of one thread; None: measured at start."""
    faults: tuple[Fault, ...] = ()
    """Faults that were requested and have not occurred yet."""
    roll_backs: tuple[JsonObject, ...] = ()
    """Data of the job's previous `rolled_back` events (`manta.workers.training.bad_numbers.RollBack`): samples that
    they skipped stay skipped."""
    in_place: bool = False
    """Whether a trainer that loses a peer comes to rest and waits for the next order instead of ending. A trainer that
    was asked to rest between two steps does so in any case."""
    tries_repair: bool = False
    """Whether the ranks first test repair in place. If all of them can, a trainer behaves as with `in_place`; otherwise
    it ends when it loses a peer."""
    ports: PortRange | None = None
    """Ports on which the rank listens for its peers; None: any. Filled in by its agent."""
    protocol: int = PROTOCOL
    """Protocol of the control plane."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size, pipeline stages and replicas of the spec; its context and expert sizes unless they are
        1, as before there were others."""
        layout = self.spec.get("parallel") or {}
        sizes = tuple(layout.get(axis) or 1 for axis in ("tensor", "pipeline", "data", "context", "expert"))
        return sizes[: 5 if sizes[4] > 1 else 4 if sizes[3] > 1 else 3]


@dataclass(frozen=True)
class TrainerArgument:
    """The argument with which a trainer process is forked."""

    order: LaunchOrder
    prepare: bool = False
    """Build what such an order needs, and wait for an order to carry out, instead of carrying this one out."""


@dataclass(frozen=True)
class Launched:
    """An agent's answer to a launch."""

    pid: int
    """Process id of the trainer."""
    kept: bool = False
    """Whether the trainer that was at rest continues, rather than a new one."""


@dataclass(frozen=True)
class AgentDescription:
    """Where a rank's agent is, and what runs under it."""

    host: str
    """Name of the machine."""
    address: str
    """IP address under which other nodes reach it."""
    pid: int
    """Process id of the agent."""
    node: str | None = None
    """Ray's id of the node; None outside of Ray."""
    trainer_pid: int | None = None
    """None while no trainer runs."""
    generation: int = 0
    """Generation of the last launch; 0 before the first."""
    group: str = ""
    """Name of the placement group that it is in."""
    devices: tuple[str, ...] = ()
    """GPUs of the rank, in the form of CUDA_VISIBLE_DEVICES."""
    rank: int | None = None
    """Rank of the last launch; None before the first."""
    sizes: tuple[int, ...] = ()
    """`LaunchOrder.sizes` of the last launch; empty before the first."""
    cores: int = 0
    """Processors that it may keep busy; 0: its release does not report them."""
    owner_epoch: int = 0
    """Highest epoch of a control plane that has called it; 0: none that has an epoch."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot file of a job on an agent's node."""

    path: str
    rank: int
    """The rank whose state it contains."""
    layout: str
    """Tag of the layout."""
    is_backup: bool = False
    """Whether that rank lives on another node."""
    steps: tuple[int, ...] = ()
    """Committed steps that are complete in it."""


@dataclass(frozen=True)
class Endpoint:
    """A port of a host on which a server listens, or may listen."""

    host: str
    port: int


@dataclass(frozen=True)
class ListeningPorts:
    """Where a node's daemon accepts connections for a moment, so that others can test whether they reach it."""

    host: str
    ports: tuple[int, ...]


@dataclass(frozen=True)
class ForkRequest:
    """A request to a zygote; the child's control socket, standard output and standard error are sent with it."""

    entry: str
    """Which of the zygote's functions the child runs."""
    argument: JsonObject
    """The function's argument, as JSON."""
    environment: dict[str, str]
    """Additions to the zygote's environment."""
    protocol: int = PROTOCOL
    """Protocol of the requester."""


@dataclass(frozen=True)
class ForkAnswer:
    """A zygote's answer: first that the child runs, or why there is none; later how it ended."""

    pid: int | None = None
    code: int | None = None
    """Exit status of a child that has ended; None if a signal ended it."""
    signal: int | None = None
    error: str | None = None
    """Why there is no child."""
    protocol: int = PROTOCOL
    """Protocol of the zygote."""


@dataclass(frozen=True)
class StoreArgument:
    """The argument with which the process of a rendezvous store is forked."""

    host: str
    """Address to listen at."""
    ports: PortRange | None = None
    """Listen on one of these; None: any."""


@dataclass(frozen=True)
class StorePort:
    """The answer of the process of a rendezvous store once it serves."""

    port: int


@dataclass(frozen=True)
class PeakRate:
    """The answer of the process that measures a device."""

    peak_flops: float
    """FLOP/s of the device; of a CPU, of one thread."""
    source: str
    """table: the maker's dense peak; measured: the best of several matrix products on this machine."""


@dataclass(frozen=True)
class GpuReading:
    """The driver's information about one GPU; None: it does not report that."""

    index: int
    """The driver's index of the GPU, on its machine."""
    answers: bool = True
    """False: the driver cannot reach it any more."""
    busy_ratio: float | None = None
    """Fraction of the driver's last sample in which a kernel ran."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    xids: dict[str, int] = field(default_factory=dict)
    """Errors that the driver has reported since the daemon started, by their code (XID)."""
    clock_mhz: int | None = None
    """Current clock rate of its multiprocessors."""


@dataclass(frozen=True)
class Heartbeat:
    """The content of each heartbeat of a node's daemon."""

    node: str
    """Ray's id of the node."""
    draining: bool = False
    """Whether the node is being drained."""
    drain_seconds: float | None = None
    """How long it can still be relied on; None if that is not known."""
    drain_reason: str = ""
    """Why it is being drained, in words; empty if no reason was given."""
    stays: bool = False
    """Whether it was being drained, and no longer is."""
    gpus: tuple[GpuReading, ...] | None = None
    """The machine's GPUs; None: unchanged on this connection, or not known."""


@dataclass(frozen=True)
class NodeDescription:
    """A node as its daemon sees it."""

    node: str
    """Ray's id of the node."""
    host: str
    """Name of the machine."""
    address: str
    """IP address under which other nodes reach it."""
    pid: int
    """Process id of the daemon."""
    heartbeat_port: int
    """Port at `address` from which the daemon sends heartbeats."""
    heartbeat_secret: str = ""
    """What a request for a heartbeat has to contain."""
    zygote_pid: int | None = None
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    peak_flops: float | None = None
    """Peak FLOP/s of one thread on the CPU; None until measured, or if that failed."""
    unshared: tuple[str, ...] = ()
    """Folders of the service that this node does not share, though it should."""
    code: str = ""
    """Identifies the code that runs there (`workers/node/host.py`); empty in releases that do not report it."""
    protocol: int = PROTOCOL
