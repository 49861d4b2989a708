"""Responses of the REST API about plans: estimated time and memory of layouts, and their comparison with
measurements."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from manta.api.schemas.base import Answer


class PlanMemory(Answer):
    """Memory of the rank that needs the most, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Activations saved from forward to backward, including the logits."""
    buffers: int
    """Temporary buffers."""
    total: int


class StepParts(Answer):
    """Seconds of a step by part."""

    pipeline: float
    """Forward and backward passes and the waiting between them."""
    gradients: float
    """Reduction over the replicas that does not overlap with other work."""
    tied_embedding: float
    """Summing the gradients of an embedding that two stages share."""
    optimizer: float
    waiting: float
    """Waiting for the slowest replica."""


class BesideSteps(Answer):
    """Work of the training outside its steps."""

    validation_seconds: float | None
    """Maximum time of one validation; null: no validation."""
    validation_hours: float
    """Time of all validations."""
    snapshot_every_steps: int | None
    """Steps between snapshots; null: no snapshots."""
    snapshot_stall_seconds: float
    """How long an update waits for a copy of the state."""
    snapshot_hours: float
    """Time of all updates that wait for snapshots."""
    checkpoint_bytes: int
    """Size of a durable checkpoint, without what the job does not train, which is written once."""
    checkpoint_hours: float
    """Time of updates that wait for copies at steps without a snapshot; writing checkpoints overlaps with training."""
    storage_bytes_per_second: float | None
    """Rate required to write a checkpoint before the next one is due; null: there is no next one."""


class Plan(Answer):
    """A layout that fits, with its estimated performance and memory."""

    parallel: dict[str, Any]
    """The layout, as in a JobSpec."""
    micro_batch_size: int
    precision: str = "fp32"
    """Number format of the computation: the job's, or bf16 if it names none and the GPUs have it."""
    gpus: int
    """Number of ranks."""
    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    """10^12 FLOP/s of the model, with attention counted in full."""
    hardware_tflops_per_gpu: float
    """10^12 FLOP/s, with attention counted in full and recomputation included."""
    mfu_full: float
    mfu_causal: float
    hfu_full: float
    bubble_ratio: float
    """Fraction of the pipeline's time in which its busiest stage waits."""
    memory_bytes: PlanMemory
    """For the tokens that plans expect: with parallel.expert, those of the busiest rank's experts are expected to be
    1.25 times the mean."""
    worst_memory_bytes: int | None = None
    """Total if all tokens of an expert group go to the experts of one rank; null without parallel.expert, where there
    is no such case."""
    host_memory_bytes: int
    """Host memory of a node, of the kind that needs the most: snapshots, and offloaded activations and optimizer
    state."""
    step_parts: StepParts
    beside_steps: BesideSteps
    hours: float
    """Time of train.steps steps and of the work outside them."""
    gpu_hours: float


class RejectedPlan(Answer):
    """A layout that was rejected."""

    parallel: dict[str, Any]
    reason: str
    """Why it was rejected, as a sentence."""


class StepShare(Answer):
    """A part of a planned step."""

    name: str
    """Stable code."""
    label: str = ""
    """Name for users; empty from a service of an earlier release."""
    seconds: float
    """Mean over the ranks; may be negative for products, if kernels skip work that the FLOPs include."""
    what: str
    help: str
    """What would reduce it; empty if nothing would."""


class PlanChange(Answer):
    """Effect of one change of a plan."""

    change: str
    """The changed key and value, as in a JobSpec."""
    step_seconds: float
    memory_bytes: int
    """Memory of the rank that needs the most."""
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
    """Seconds since the start of the step."""
    end: float


class PlannedRun(Answer):
    """A simulation of the whole training with failures; their rates and costs are in docs/planner.md."""

    hours: float
    gpu_hours: float
    """Including spares."""
    goodput: float
    """Fraction of the time spent training."""
    failures: float
    lost_hours: dict[str, float]
    """Lost hours by reason: redone, recovering, checkpoints, waiting, slower, beside_steps."""
    spare_nodes: int
    """Number of spare nodes that costs the fewest GPU-hours."""
    checkpoint_seconds: float
    """Optimal time between checkpoints."""
    goodput_with_restarts: float
    """Goodput of a system that restarts everything from a checkpoint after each failure."""
    gpu_hours_with_restarts: float


class Machine(Answer):
    """Performance constants of a type of node, measured by `manta calibrate` or from jobs, that plans for this type
    use."""

    name: str
    """Processor and cores, or the type of GPU, which identify the type of node."""
    measured_at: datetime
    """When it was calibrated; if it was not, when the newest job that refines it began."""
    device: str | None
    """Processor or GPU; null if it was not calibrated."""
    cores: int | None
    """Number of cores; null if it was not calibrated."""
    constants: dict[str, float] | None
    """The eight performance constants of a core or GPU, described in docs/planner.md. If it was not calibrated: as
    refined by jobs."""
    this_node: bool
    """Whether the control plane that answers runs on such a node; unknown for GPUs."""
    problem: str | None
    """Why the calibration cannot be used; then device, cores and constants are null."""
    warning: str | None = None
    """Why its constants may be wrong: the calibration was disturbed."""
    links: dict[str, float] | None = None
    """What was measured between the GPUs of a node: `bandwidth` (bytes/s), `hop_seconds`, and the mean `error` with
    which both tell what was measured; null where nothing was, and without GPUs."""
    links_note: str | None = None
    """Why that was not measured at the last calibration, and what plans go by."""
    refined: dict[str, float] = Field({})
    """Constants that a calibration does not measure and that jobs have refined: the ratio to their assumed values."""
    refined_by_jobs: int = 0
    """Number of jobs whose steps were used."""


class PlanSize(Answer):
    """The layout to continue with on fewer GPUs."""

    gpus: int
    """Number of GPUs of the layout."""
    up_to: int
    """The layout is used from `gpus` up to this many GPUs."""
    nodes: dict[str, int] | None
    """Number of nodes by GPU type, if the nodes are unequal."""
    parallel: dict[str, Any]
    micro_batch_size: int
    step_seconds: float
    tokens_per_second: float
    memory_bytes: int
    """Memory of the rank that needs the most."""
    fits: bool


class PlannedPart(Answer):
    """A part of a planned step."""

    name: str
    seconds: float
    fraction: float
    """Fraction of the step; all parts add up to the step."""
    what: str
    help: str | None
    """What would reduce it; null if nothing would."""


class PlannedStep(Answer):
    """Estimated time and memory of a step of a job where it runs."""

    step_seconds: float
    memory_bytes: PlanMemory
    parts: list[PlannedPart]
    """From the device's peak down to the MFU."""
    assumed: bool
    """Whether the estimate is based on assumptions only, without measurements on such a machine."""
    has_gpus: bool
    """Whether each rank has a GPU, whose memory the estimate can be compared with."""
    sizes: list[PlanSize] = Field([])
    """The layouts that the job continues with as it loses GPUs, largest first; empty if its size is fixed."""
    refined_by_jobs: int = 0
    """Number of jobs whose steps have refined the assumptions about such a machine; 0: none."""


class MeasuredStep(Answer):
    """Measured time and memory of a job's steps, excluding the first ones."""

    first_step: int
    last_step: int
    step_seconds: float
    """Median of these steps."""
    memory_bytes: int | None
    """Maximum over the ranks: on GPUs the peak of allocated memory, otherwise the resident memory of the process."""
    parts: dict[str, float] | None
    """Median seconds by part as measured by the engine; null if no typical step was measured by parts."""
    spread: float | None = None
    """Interquartile range of the steps' times, as a fraction of their median; null for fewer than four steps."""


class ComparedPart(Answer):
    """A group of parts with the same meaning in a plan and in a measurement."""

    name: str
    """Stable code."""
    label: str = ""
    """Name for users; empty from a service of an earlier release."""
    planned: float
    """Planned seconds of a step."""
    measured: float


class PlanDrift(Answer):
    """A difference of more than 20% between a job and its plan."""

    ratio: float
    """Ratio of measured to planned time."""
    part: str
    """The part with the largest difference."""
    message: str


class JobPlan(Answer):
    """The plan of a job, made when it last started or changed its layout, and measurements to compare with it."""

    generation: int | None
    """Generation that was planned; null before the first."""
    parallel: dict[str, Any] | None
    """The planned layout."""
    planned: PlannedStep | None
    problem: str | None
    """Why there is no plan, or not yet."""
    measured: MeasuredStep | None
    """Measurements; null before the sixth step."""
    compared: list[ComparedPart]
    """Plan and measurement by groups of parts; empty if one of them is missing."""
    drift: PlanDrift | None
    """Null if the difference is within 20%, and before 25 steps."""


class PlanExplanation(Answer):
    """Breakdown of a step of the best plan, and the effects of changes."""

    sentences: list[str]
    """The largest losses, and what would reduce them."""
    shares: list[StepShare]
    """Parts of the step, starting from the device's peak; they add up to the step."""
    changes: list[PlanChange]
    """Single changes: those that fit first, fastest first, then those that do not fit."""
    memory_by_stage: list[PlanMemory]
    """Memory of a rank of each pipeline stage."""
    usable_bytes: int
    """Usable bytes of the largest device's memory."""
    usable_by_stage: list[int]
    """Usable bytes of the memory of each stage's devices."""
    run: PlannedRun | None
    """The simulated training; null if it takes less than a day, or without accelerators."""
    timeline: list[PlannedPass] | None
    """The pipeline of one step; null if it has more than 20,000 passes."""


class Plans(Answer):
    """Result of a planning request."""

    plans: list[Plan]
    """Plans, best first; empty if nothing fits."""
    rejected: list[RejectedPlan]
    """For each other tensor and pipeline size, the layout that came closest."""
    note: str | None = None
    """A note about the estimated times, for machines without measurements."""
    explanation: PlanExplanation | None = None
    """Explanation of the first plan; only if requested."""
    sizes: list[PlanSize] | None = None
    """For `parallel: auto` the best layout for every number of GPUs, largest first; for a layout those that `elastic`
    allows. Only if requested."""
