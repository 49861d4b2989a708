"""What the REST API answers, as data. The client reads answers with the models that the server writes them with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from workers.nonfinite import number, spell

T = TypeVar("T")


def rfc3339(moment: datetime) -> str:
    """`moment` as RFC 3339 in UTC, with microseconds and a Z."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Time = Annotated[
    datetime,
    PlainSerializer(rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment; RFC 3339 in UTC on the wire."""

_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}, {"type": "null"}]}
Number = Annotated[
    int | float | None,
    BeforeValidator(number),
    PlainSerializer(spell, when_used="json"),
    WithJsonSchema(_NUMBER_SCHEMA),
]
"""A number or null; the non-finite ones are the strings "nan", "inf" and "-inf" on the wire."""


Direction = Literal["asc", "desc"]
"""Of an order."""
JobSort = Literal["created", "name", "state", "step", "loss", "priority", "finished"]
"""What jobs are ordered by."""


class Answer(BaseModel):
    """Base of all answers. A newer service may say more than this client knows."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class FieldProblem(Answer):
    """One thing that is wrong with a request."""

    path: str
    """Dotted path of the field, or name of the parameter."""
    rule: str
    """The rule that is broken."""
    suggestion: str | None = None
    """The nearest value that works."""


class Problem(Answer):
    """An error (RFC 9457)."""

    code: str
    """Stable code."""
    title: str
    """What the status means."""
    status: int
    """HTTP status."""
    detail: str
    """One sentence that says what to do next."""
    errors: list[FieldProblem] = []
    """Every single thing that is wrong."""


class Items(Answer, Generic[T]):
    """A page of a list."""

    items: list[T]
    """The items."""
    next_cursor: str | None = None
    """Give this as `cursor` for the next page; null on the last one."""


class Stream(Items[T], Generic[T]):
    """A page of a list that still grows."""

    resume_cursor: str
    """Give this as `cursor` to read only what came after this page, also when it is the last one for now."""


class LatestMetrics(Answer):
    """Latest known value of each metric."""

    latest: dict[str, Number]
    """By metric name, `step` included; null where it is not known yet."""


class Queue(Answer):
    """A queued job's place."""

    position: int | None = None
    """From 1; null for a job that is not QUEUED."""
    waiting_for: dict[str, Any] | None = None
    """What is missing, such as needed and available slots."""


class Job(Answer):
    """One training job."""

    id: str
    """Its id."""
    project: str | None = None
    """The project that it belongs to; null from a service of a release before there were any."""
    etag: str | None = None
    """For If-Match: another one whenever something has changed that a PATCH can change."""
    name: str
    """Its name, not necessarily unique."""
    labels: dict[str, str] = {}
    """By key."""
    owner: str | None = None
    """The user who submitted it, else the name of the key; null of a job that a release before stored."""
    state: str
    """Where it is in its life."""
    reason: str | None
    """Stable code that says why it is in this state."""
    message: str | None
    """The same for people."""
    spec: dict[str, Any]
    """The checked JobSpec with all defaults."""
    step: int
    """Last committed step."""
    steps: int
    """Steps of the whole job."""
    eta_seconds: float | None
    """Expected time to the last step, from the newest steps' duration; null where nothing is running."""
    parallel: dict[str, Any]
    """The layout in use, with its world_size."""
    generation: int
    """Starts of the gang so far."""
    restarts: int
    """Automatic restarts so far."""
    metrics: LatestMetrics
    """Latest known numbers."""
    goodput: float | None
    """Compute / (wall - queue - pause) by the job's ledger, 0 to 1; null before the first committed step."""
    queue: Queue
    """Its place in the queue."""
    created_at: Time
    """When it was submitted."""
    started_at: Time | None
    """When it first left the queue."""
    finished_at: Time | None
    """When it reached its final state."""
    memory_kept_until: Time | None = None
    """Of a job that failed: until when its snapshots stay in memory for a retry."""
    deletion_began_at: Time | None = None
    """Since when it is being deleted, where that could not be finished: delete it again."""


class JobCounts(Answer):
    """How many jobs there are."""

    total: int
    """All together."""
    by_state: dict[str, int]
    """In each state, zeros included."""


class Sparkline(Answer):
    """How a job's loss went, in short."""

    job: str
    """Job id."""
    loss: list[Number]
    """At most 32 values over its steps, by `get_metrics`'s choice of steps; empty before the first."""


class DeletedJob(Answer):
    """What was deleted with a job."""

    id: str
    """The job's id, by which it is not found any more."""
    rows: dict[str, int]
    """Rows of the database, by table: events, metrics and so on."""
    checkpoints: int
    """Durable checkpoints, whole or not."""
    logs: int
    """Log files of ranks."""
    bytes: int
    """Size of all its files on disk."""


class RankPlace(Answer):
    """A rank's place in the grid."""

    rank: int
    """Global rank."""
    tensor: int
    """Place in its tensor group."""
    pipeline: int
    """Pipeline stage."""
    data: int
    """Replica."""
    context: int
    """Place in its context group."""


class Straggler(Answer):
    """That a rank holds up the others."""

    own_seconds: float
    """Of a step: its median over the last steps."""
    usual_seconds: float
    """The same of its peers."""
    sentence: str
    """For people."""


class Rank(RankPlace):
    """A rank's place in the grid and on the cluster."""

    node: str | None
    """Node that it runs on."""
    device: str | None
    """Device that it runs on."""
    pid: int | None
    """Process id of its trainer."""
    generation: int
    """Generation of its trainer."""
    state: str
    """What it is doing."""
    own_seconds: float | None = None
    """Of a step, what it did not wait for others: the mean over the last seconds; null where that is not known."""
    wait_seconds: float | None = None
    """Of the same steps, up to where all ranks agree, what it waited."""
    memory_bytes: int | None = None
    """In use by it, to seven digits."""
    straggler: Straggler | None = None
    """Null where it does not hold up the others."""


class WaitingRank(Answer):
    """Where one rank stands."""

    rank: int
    phase: str
    """Such as forward, backward, reduction, agreement; exited without a trainer, unknown without an answer."""
    doing: str
    """The same in words, with the communication that it waits in."""
    since_seconds: float | None
    """For how long nothing has changed; null where nobody knows."""
    waits_for: list[int]
    """Ranks without which it cannot go on, as far as that is known."""
    step: int | None
    """Step that it computes."""


class Waits(Answer):
    """Who waits for whom."""

    at: Time
    """When all were asked."""
    ranks: list[WaitingRank]
    """By number."""
    culprits: list[int]
    """Ranks that keep the others from going on, and have stood still for longer than they may."""
    sentence: str
    """What that means, for people."""


class RankStack(Answer):
    """Where a rank's trainer is."""

    rank: int
    pid: int
    """Process id of its trainer."""
    at: Time
    """When it was asked."""
    text: str
    """The Python stacks of all its threads; of a stopped process what the kernel tells."""


class RankHistory(Answer):
    """How all ranks were doing over the last samples."""

    steps: list[int]
    """The last step of each sample, ascending."""
    times: list[Time]
    """When each was put together."""
    own_seconds: list[list[float]]
    """Of each sample, by rank: of a step, what the rank did not wait for others."""


class Layout(Answer):
    """How a spec would be laid out."""

    parallel: dict[str, Any]
    """The layout, with its world_size."""
    world_size: int
    """Number of ranks."""
    micro_batches: int
    """Micro-batches that one replica runs in a step."""
    ranks: list[RankPlace] | None
    """Every rank's place; null for more than 4096 ranks."""


class DryRun(Answer):
    """What a submission would have done."""

    spec: dict[str, Any]
    """The checked JobSpec with all defaults."""
    layout: Layout
    """Its layout."""
    plan: Plan | None = None
    """What a step of it takes on this cluster."""
    plan_note: str | None = None
    """What to know of its times, or why there is no plan."""


class PlanMemory(Answer):
    """Bytes that the rank needs which needs most."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept from forward to backward, with the logits."""
    buffers: int
    """Beside them for a moment."""
    total: int


class StepParts(Answer):
    """Where a step's seconds go."""

    pipeline: float
    """Forwards, backwards and the waiting between them."""
    gradients: float
    """Reduction over the replicas, as far as nothing hides it."""
    tied_embedding: float
    """Summing the gradients of an embedding that two stages hold."""
    optimizer: float
    waiting: float
    """For the slowest replica."""


class Plan(Answer):
    """A layout that fits, and what it is expected to do."""

    parallel: dict[str, Any]
    """The layout, as in a JobSpec."""
    micro_batch_size: int
    gpus: int
    """Ranks of the layout."""
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    """10^12 FLOP/s of the model, attention in full."""
    hardware_tflops_per_gpu: float
    """The same with what is recomputed."""
    mfu_full: float
    mfu_causal: float
    hfu_full: float
    bubble_ratio: float
    """Part of the pipeline's time in which its busiest stage waits."""
    memory_bytes: PlanMemory
    host_memory_bytes: int
    """Of a node, for snapshots."""
    step_parts: StepParts
    hours: float
    """For train.steps steps."""
    gpu_hours: float


class RejectedPlan(Answer):
    """A layout that is not among the best."""

    parallel: dict[str, Any]
    reason: str
    """Why, as a sentence."""


class StepShare(Answer):
    """A part of a planned step."""

    name: str
    """Stable code."""
    seconds: float
    """Of each rank, in the mean; that of products may be below zero, where kernels leave out what FLOPs count."""
    what: str
    help: str
    """What would make it smaller; empty where nothing does."""


class PlanChange(Answer):
    """What one change of a plan would do."""

    change: str
    """As in a JobSpec."""
    step_seconds: float
    memory_bytes: int
    """Of the rank that needs most."""
    fits: bool


class PlannedPass(Answer):
    """One pass of a micro-batch through a virtual stage."""

    rank: int
    """Pipeline rank."""
    kind: Literal["forward", "backward", "backward_input", "backward_weight"]
    stage: int
    """Virtual stage, in the model's order."""
    micro_batch: int
    begin: float
    """Seconds from the step's start."""
    end: float


class PlannedRun(Answer):
    """A whole training with failures, simulated; docs/planner.md says at which rates, and what they cost."""

    hours: float
    gpu_hours: float
    """With spares."""
    goodput: float
    """Part of the time that trains."""
    failures: float
    lost_hours: dict[str, float]
    """By reason: redone, recovering, checkpoints, waiting, slower."""
    spare_nodes: int
    """With which it takes the fewest GPU-hours."""
    checkpoint_seconds: float
    """Best time between two checkpoints."""
    goodput_with_restarts: float
    """Of a system that starts everything again from a checkpoint after each failure."""
    gpu_hours_with_restarts: float


class Machine(Answer):
    """A type of node that `manta calibrate` has measured, by which plans for its kind go."""

    name: str
    """Processor and cores, as nodes of that type are told apart."""
    measured_at: datetime
    device: str | None
    """Its processor."""
    cores: int | None
    constants: dict[str, float] | None
    """What a core reaches: the eight of docs/planner.md."""
    this_node: bool
    """Whether the control plane that answers is on such a node."""
    problem: str | None
    """Why it cannot be used; then the three before are null."""


class PlanSize(Answer):
    """What to go on with on fewer GPUs."""

    gpus: int
    """That the layout takes."""
    up_to: int
    """It is the one for this many GPUs, and any number in between."""
    parallel: dict[str, Any]
    micro_batch_size: int
    step_seconds: float
    tokens_per_second: float
    memory_bytes: int
    """Of the rank that needs most."""
    fits: bool


class PlannedPart(Answer):
    """A part of a planned step."""

    name: str
    seconds: float
    fraction: float
    """Of the step; all parts together are it."""
    what: str
    help: str | None
    """What would make it smaller; null where nothing does."""


class PlannedStep(Answer):
    """What a step of a job is planned to take where it runs."""

    step_seconds: float
    memory_bytes: PlanMemory
    parts: list[PlannedPart]
    """From the device's peak down to the MFU."""
    assumed: bool
    """Whether nothing was measured or fitted on such a machine."""
    has_gpus: bool
    """Whether each rank has a GPU, whose memory it can be held against."""
    sizes: list[PlanSize] = []
    """The layouts that it goes on in as it loses GPUs, most first; empty where its size is fixed."""


class MeasuredStep(Answer):
    """What steps of a job took, once the first ones had settled."""

    first_step: int
    last_step: int
    step_seconds: float
    """Median of these steps."""
    memory_bytes: int | None
    """Most of any rank: on GPUs the peak of their memory, else all that a process has resident."""
    parts: dict[str, float] | None
    """Seconds by part as the engine measures them, medians; null where it measured no step in parts."""


class ComparedPart(Answer):
    """A group of parts that means the same in a plan and in a measurement."""

    name: str
    planned: float
    """Seconds of a step."""
    measured: float


class PlanDrift(Answer):
    """How far a job is from its plan, beyond 20%."""

    ratio: float
    """Of what was measured to what was planned."""
    part: str
    """What makes most of the difference."""
    message: str


class JobPlan(Answer):
    """What was planned of a job when it last began or changed its layout, and what became of that."""

    generation: int | None
    """That it was planned of; null before the first."""
    parallel: dict[str, Any] | None
    """The layout that it is about."""
    planned: PlannedStep | None
    problem: str | None
    """Why nothing is planned, or not yet."""
    measured: MeasuredStep | None
    """Null before its sixth step."""
    compared: list[ComparedPart]
    """Both by groups of parts; empty while one of them is missing."""
    drift: PlanDrift | None
    """Null within 20%, and before 25 steps."""


class PlanExplanation(Answer):
    """Where the step of the best plan goes, and what would change that."""

    sentences: list[str]
    """The largest losses, and what helps."""
    shares: list[StepShare]
    """From the device's peak on; together the step."""
    changes: list[PlanChange]
    """Of one thing at a time: the fastest that fit first, then those that do not fit."""
    memory_by_stage: list[PlanMemory]
    """Of a rank of each pipeline stage."""
    usable_bytes: int
    """Of a device's memory."""
    run: PlannedRun | None
    """Null of a training of less than a day, or without accelerators."""
    timeline: list[PlannedPass] | None
    """The pipeline of one step; null where it has more than 20,000 passes."""


class Plans(Answer):
    """What a plan was asked for."""

    plans: list[Plan]
    """Best first; empty where nothing fits."""
    rejected: list[RejectedPlan]
    """Of each other tensor and pipeline size the layout that came nearest."""
    note: str | None = None
    """What to know of these times: on machines that the planner has no measurements of."""
    explanation: PlanExplanation | None = None
    """Of the first plan, where it was asked for."""
    sizes: list[PlanSize] | None = None
    """Of `parallel: auto` the best layout for every number of GPUs, from all down to the fewest; of a layout those that
    `elastic` allows. Where they were asked for."""


class MetricSeries(Answer):
    """Metrics over steps."""

    steps: list[int]
    """Committed steps, ascending."""
    series: dict[str, list[Number]]
    """One value a step, by metric name."""


class Event(Answer):
    """Something that happened to a job."""

    id: str
    """Grows with time."""
    time: Time
    """When it happened."""
    type: str
    """Stable code."""
    generation: int | None
    """Generation that it belongs to."""
    rank: int | None
    """Rank that it is about."""
    step: int | None
    """Step that it is about."""
    message: str
    """One sentence."""
    data: dict[str, Any]
    """More about it."""


class JobEvent(Event):
    """An event, and the job that it happened to."""

    job: str
    """Job id."""


class LogLine(Answer):
    """One line that a rank printed."""

    time: Time
    """When it was printed."""
    rank: int
    """The rank that printed it."""
    generation: int
    """Generation of its trainer."""
    stream: str
    """stdout or stderr; agent for what its agent wrote."""
    text: str
    """The line."""
    level: str | None = None
    """How serious it says that it is: debug, info, warning, error or critical; null where it says nothing."""


class LogLines(Stream[LogLine]):
    """Lines that ranks printed."""

    earlier: bool | None = None
    """With `tail`: whether there are earlier lines, or may be, of those that are wanted."""
    earlier_cursor: str | None = None
    """Give this as `before`, with `tail`, for these; null where there are none."""


class Checkpoint(Answer):
    """One durable checkpoint."""

    id: str
    """Its id."""
    step: int
    """Committed step whose state it holds."""
    state: str
    """saving, complete, failed or deleted."""
    path: str
    """Its folder."""
    bytes: int | None
    """Size on disk, once complete."""
    created_at: Time
    """When its saving began."""
    generation: int | None = None
    """Generation that saved it."""
    exists: bool | None = None
    """Whether its files are there, as far as is known; null while it is being saved."""
    age_seconds: float | None = None
    """Since it was complete; null for others."""
    kept_because: str | None = None
    """Why it is not deleted when the next one is complete, in a sentence; null where that is not known."""


class LedgerInterval(Answer):
    """A part of a job's time line."""

    begin: Time
    end: Time
    seconds: dict[str, float]
    """By class, what it is made of: one class, or those of a training loop."""


class Export(Answer):
    """Weights of a checkpoint that are written for others, or were."""

    id: str
    """Its id."""
    job: str
    """Job id."""
    checkpoint: str
    """Id of the checkpoint, which may be gone."""
    to: str
    """Folder on the machine of the service that was asked."""
    format: str
    """hf or safetensors."""
    dtype: str | None
    """Of the numbers; null: that of the weights that the job began with, or fp32."""
    state: Literal["running", "done", "failed"]
    """The folder is there as a whole once it is done, and else not at all."""
    message: str | None
    """Why it failed."""
    done_bytes: int
    """Written so far."""
    total_bytes: int | None
    """Of all tensors; null before that is known."""
    created_at: Time
    """When it began."""


class Ledger(Answer):
    """Where every second of a job went, from its submission to its end, or to now."""

    seconds: dict[str, float]
    """By class: queue, start, compute, data_wait, snapshot_stall, checkpoint_stall, detect, re_form, restore, redo,
    idle_without_capacity, pause. They sum to `wall_seconds`."""
    wall_seconds: float
    """From `began_at` to `until`."""
    goodput: float | None
    """Compute / (wall - queue - pause), 0 to 1; null before the first committed step."""
    closed: bool
    """Whether the job is over, so that nothing will change any more."""
    began_at: Time
    """When the job was submitted."""
    until: Time
    """When it ended, or now."""
    intervals: list[LedgerInterval] | None = None
    """The time line, without gaps; where it was asked for."""


class Recovery(Answer):
    """How one generation came about that a failure made necessary."""

    generation: int
    """The generation that it began."""
    time: Time
    """When the failure happened."""
    kind: str
    """Kind of the failure, such as killed, hung, agent_lost or exception."""
    rank: int
    """The culprit."""
    node: str | None
    """Node that the culprit ran on."""
    cause: str
    """What happened to it, in one sentence."""
    forked: list[int]
    """Ranks that got a new process."""
    kept: int
    """Number of ranks that kept theirs."""
    source: str
    """Where the state came from, such as memory, snapshot, peer, replica or checkpoint."""
    resume_step: int
    """Committed step that the state belongs to."""
    steps_redone: int | None
    """Committed steps that were done again; null before the first one of this generation."""
    wait_seconds: float
    """How long it was held back because the same failure kept coming."""
    seconds: dict[str, float | None]
    """By phase: detect, rest, re_form, restore, redo; null where a phase has not ended. `redo` ends with the next
    committed step."""
    total_seconds: float | None
    """From the failure to the next committed step; null before that."""


class Fault(Answer):
    """A fault that will be made. The event `fault_injected` tells of it, and `fault_struck` that it has struck."""

    id: str
    """Names it in the job's events."""
    message: str
    """What it is, for people."""


class RunningRank(Answer):
    """What occupies a place on a node."""

    job: str
    """Job id."""
    rank: int
    """Global rank in it."""


class Gpu(Answer):
    """One GPU of a node, as its driver said in the last minute; null: it does not say that."""

    index: int
    """The driver's, on its machine."""
    answers: bool = True
    """Whether the driver reaches it."""
    utilization: float | None = None
    """Part of the last sample's time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_mhz: int | None = None
    """Of its multiprocessors."""
    xid: list[int] = []
    """Codes of the errors (XID) that the driver has told since the node's daemon began."""
    ecc_errors: int | None = None
    """Memory errors that were not corrected, since the driver was loaded."""
    ecc_corrected: int | None = None
    """Those that were."""


class Node(Answer):
    """One machine of the cluster."""

    id: str
    """Its id."""
    address: str
    """Its address."""
    alive: bool
    """Whether it answers."""
    draining: bool = False
    """Whether it is to be left: jobs move away from it, and none is placed there."""
    problem: str | None = None
    """Why none is placed there until somebody mends it, in a sentence."""
    accelerator: str
    """What a rank takes there unless its job asks for the other: gpu, or cpu where there is none."""
    total: float
    """Places for ranks, of that kind."""
    free: float
    """Places that nobody has."""
    slots_total: float = 0
    """CPU slots, which a node has beside GPUs too."""
    slots_free: float = 0
    """CPU slots that nobody has."""
    gpu_type: str | None = None
    """What Ray calls the type of its GPUs, where it has recognised them: H100."""
    gpu_memory_bytes: int | None = None
    """Of its smallest GPU, where the node's driver has been asked."""
    gpus: list[Gpu] = []
    """Empty where there are none, or nothing is known of them."""
    ranks: list[RunningRank] = []
    """Who has the others."""


class Cluster(Answer):
    """All machines."""

    nodes: list[Node]
    """One entry a machine."""
    totals: dict[str, Any] = Field(default_factory=dict)
    """Sums over living machines: total and free of GPUs, or of slots where none has any; slots_total, slots_free."""


class ClusterCheck(Answer):
    """What came out when the nodes tried each other's ports."""

    problems: list[str]
    """Closed ports, from where to where, in sentences that say what to do."""
    warnings: list[str] = []
    """Nodes of which nothing is known, and what would be lost with Ray's head."""
    nodes: int
    """Nodes that took part."""
    tries: int
    """Connections that were tried."""


class Health(Answer):
    """That the process is alive, or the service ready."""

    status: str
    """ok or ready."""
