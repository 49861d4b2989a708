"""Plans, and how jobs compare with them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Answer


class PlanMemory(Answer):
    """Bytes needed by the rank that needs most."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept from forward to backward, with the logits."""
    buffers: int
    """Temporary buffers at the peak."""
    total: int


class StepParts(Answer):
    """Where a step's seconds go."""

    pipeline: float
    """Forwards, backwards and the waiting between them."""
    gradients: float
    """Reduction over the replicas, as far as it is not overlapped."""
    tied_embedding: float
    """Summing the gradients of an embedding that two stages hold."""
    optimizer: float
    waiting: float
    """Waiting for the slowest replica."""


class BesideSteps(Answer):
    """What the training does besides its steps."""

    validation_seconds: float | None
    """Of one validation, at most; null: there are no validations."""
    validation_hours: float
    """Of all validations."""
    snapshot_every_steps: int | None
    """Null: none are taken."""
    snapshot_stall_seconds: float
    """For how long an update waits for a copy of the state."""
    snapshot_hours: float
    """Of all that wait for snapshots."""
    checkpoint_bytes: int
    """Of a durable one."""
    checkpoint_hours: float
    """Of updates that wait for copies of steps without a snapshot; checkpoints are written alongside the training."""
    storage_bytes_per_second: float | None
    """Write rate at which a checkpoint is complete before the next is due; null: there is no next."""


class Plan(Answer):
    """A layout that fits, and its predicted performance."""

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
    """Of a node, of the kind where it is most: for snapshots, and for activations and an optimizer's state that lie
    there."""
    step_parts: StepParts
    beside_steps: BesideSteps
    hours: float
    """For train.steps steps, and what is done besides them."""
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
    """Mean over the ranks; that of products may be negative, where kernels skip work that FLOPs count."""
    what: str
    help: str
    """What would make it smaller; empty where nothing does."""


class PlanChange(Answer):
    """Predicted effect of one change of a plan."""

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
    """By reason: redone, recovering, checkpoints, waiting, slower, beside_steps."""
    spare_nodes: int
    """With which it takes the fewest GPU-hours."""
    checkpoint_seconds: float
    """Best time between two checkpoints."""
    goodput_with_restarts: float
    """Of a system that starts everything again from a checkpoint after each failure."""
    gpu_hours_with_restarts: float


class Machine(Answer):
    """A type of node that `manta calibrate` or jobs have measured; plans for such nodes use these constants."""

    name: str
    """Processor and cores, or the type of GPU, by which types of nodes are distinguished."""
    measured_at: datetime
    """When it was calibrated; where it was not, when the newest job began that refines it."""
    device: str | None
    """Its processor, or its GPU; null where it was not calibrated."""
    cores: int | None
    """Null where it was not calibrated."""
    constants: dict[str, float] | None
    """Measured constants of a core or a GPU, as docs/planner.md lists them. Where it was not calibrated, as jobs have
    refined them."""
    this_node: bool
    """Whether the control plane that answers is on such a node; of GPUs it does not know."""
    problem: str | None
    """Why it cannot be used; then device, cores and constants are null."""
    warning: str | None = None
    """Why its constants may be wrong: the calibration was disturbed."""
    links: dict[str, float] | None = None
    """What was measured between the GPUs of a node: `bandwidth` (bytes/s), `hop_seconds`, and the mean `error` with
    which both tell what was measured; null where nothing was, and without GPUs."""
    links_note: str | None = None
    """Why that was not measured at the last calibration, and what plans go by."""
    refined: dict[str, float] = Field({})
    """Factors by which jobs have changed constants that a calibration leaves assumed."""
    refined_by_jobs: int = 0
    """Number of jobs behind these factors."""


class PlanSize(Answer):
    """The best layout for fewer GPUs."""

    gpus: int
    """GPUs that the layout uses."""
    up_to: int
    """It is the best layout for this many GPUs, and for any number in between."""
    nodes: dict[str, int] | None
    """How many nodes of each type of GPU it is for, where they are unequal."""
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
    """Of the step; all parts add up to 1."""
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
    """Whether all constants of the machine are assumed, none measured or fitted."""
    has_gpus: bool
    """Whether each rank has a GPU, whose memory it can be compared with."""
    sizes: list[PlanSize] = Field([])
    """The layouts that it continues in as it loses GPUs, most first; empty where its size is fixed."""
    refined_by_jobs: int = 0
    """Jobs whose steps have refined what is assumed of such a machine; 0: none."""


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
    spread: float | None = None
    """Interquartile range of the steps' times over their median; null for fewer than four steps."""


class ComparedPart(Answer):
    """A group of parts that means the same in a plan and in a measurement."""

    name: str
    planned: float
    """Seconds of a step."""
    measured: float


class PlanDrift(Answer):
    """How far a job is from its plan, beyond 20%."""

    ratio: float
    """Measured seconds over planned seconds."""
    part: str
    """The part that accounts for most of the difference."""
    message: str


class JobPlan(Answer):
    """A job's plan as of its last start or change of layout, compared with what was measured."""

    generation: int | None
    """Generation that it was planned for; null before the first."""
    parallel: dict[str, Any] | None
    """The planned layout."""
    planned: PlannedStep | None
    problem: str | None
    """Why nothing is planned, or not yet."""
    measured: MeasuredStep | None
    """Null before its sixth step."""
    compared: list[ComparedPart]
    """Planned and measured by groups of parts; empty while one of them is missing."""
    drift: PlanDrift | None
    """Null within 20%, and before 25 steps."""


class PlanExplanation(Answer):
    """Where the time of the best plan's step goes, and what would change that."""

    sentences: list[str]
    """The largest losses, and what helps."""
    shares: list[StepShare]
    """From the device's peak on; together the step."""
    changes: list[PlanChange]
    """Of one thing at a time: the fastest that fit first, then those that do not fit."""
    memory_by_stage: list[PlanMemory]
    """Of a rank of each pipeline stage."""
    usable_bytes: int
    """Of the memory of the largest device."""
    usable_by_stage: list[int]
    """Of that of the devices that each stage is on."""
    run: PlannedRun | None
    """Null of a training of less than a day, or without accelerators."""
    timeline: list[PlannedPass] | None
    """The pipeline of one step; null where it has more than 20,000 passes."""


class Plans(Answer):
    """The answer to a request for plans."""

    plans: list[Plan]
    """Best first; empty where nothing fits."""
    rejected: list[RejectedPlan]
    """Of each other tensor and pipeline size the layout that came nearest."""
    note: str | None = None
    """A caveat about these times, where the planner has no measurements of such machines."""
    explanation: PlanExplanation | None = None
    """Of the first plan, where requested."""
    sizes: list[PlanSize] | None = None
    """Of `parallel: auto` the best layout for every number of GPUs, from all down to the fewest; of a layout those that
    `elastic` allows. Where requested."""
