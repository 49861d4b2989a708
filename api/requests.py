"""Bodies of REST requests, as data; JobSpecs are in `workers/config/`. Unknown fields are errors, so that a typo is
never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from manta.service.identity import PROJECT_PATTERN, Scope
from manta.workers.config import MAX_LABELS, JobName, LabelKey, LabelValue, Priority
from manta.workers.protocol.messages import FaultKind, FaultPhase
from manta.workers.timing.recording import MAX_STEPS
from manta.workers.weights.mapping import Dtype, Format


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid")


class Resize(Body):
    """The size that a job should have."""

    data: Annotated[int, Field(strict=True, ge=1)]
    """Number of data-parallel replicas, within the spec's elastic.min_data..max_data."""


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


class PlannedNodes(Body):
    """Nodes of one kind."""

    accelerator: str | None = None
    """Type of the accelerators, such as a100-80gb or h100-80gb."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] | None = None
    """Accelerators of a node; default: the usual number for this type."""


class PlannedCluster(PlannedNodes):
    """Where a job would run."""

    current: Annotated[bool, Field(strict=True)] = False
    """The cluster of this service, instead; with GPUs, `accelerator` says which."""
    groups: Annotated[list[PlannedNodes], Field(min_length=1, max_length=4)] | None = None
    """Nodes of several kinds, instead."""


class PlanDocument(BaseModel):
    """A request for plans. A job's other sections may be present too, and are checked."""

    model: dict[str, Any]
    """As in a JobSpec."""
    train: dict[str, Any] = {}
    """As in a JobSpec; steps may be left out."""
    cluster: PlannedCluster
    """The cluster to plan for."""
    parallel: dict[str, Any] | Literal["auto"] = "auto"
    """A layout, or auto to search for the best ones."""
    explain: bool = False
    """Whether to explain where the time of the best plan goes, and what single changes would do."""
    sizes: bool = False
    """Whether to find the best layout for every smaller number of GPUs too."""


class JobChanges(Body):
    """Changes of a job; fields that are left out stay as they are."""

    name: JobName = Field("", json_schema_extra=_without_default)
    """Name of the job."""
    priority: Priority = Field(0, json_schema_extra=_without_default)
    """Higher starts first among queued jobs."""
    labels: Annotated[dict[LabelKey, LabelValue | None], Field(max_length=2 * MAX_LABELS)] = Field(
        {}, json_schema_extra=_without_default
    )
    """Labels to change, with null for those to remove; the others stay."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given."""
        return self.model_dump(exclude_unset=True)


class ExportRequest(Body):
    """A request to export weights."""

    to: Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00]*$")]
    """Folder on the service's machine, which must not contain anything yet: below one of those that exports may be
    written to; a relative one is below the first of them."""
    format: Format = "hf"
    """hf: weights, config and tokenizer for transformers; safetensors: weights by Manta's own names; adapter: the
    adapters of train.lora alone, in the format of PEFT. In the first two, adapters are merged into the weights."""
    dtype: Dtype | None = None
    """Data type of the weights; default: that of the weights that the job started from, or fp32; of adapters fp32."""


class FaultRequest(Body):
    """A fault to inject into a job."""

    kind: FaultKind
    """kill: SIGKILL to the rank's process; stop: SIGSTOP to it; hang: it never continues; oom: it gets no more memory;
    exception: it raises; slow: it sleeps in each step from then on; node: all that runs on its node is killed; store:
    the job's rendezvous store is killed, where it runs on the rank's node; partition: its connections are cut."""
    rank: int = Field(ge=0, le=10**8)
    """Global rank."""
    at_step: int = Field(0, ge=0, le=2**53)
    """First step in which it may happen; if the job is past it, the next step."""
    phase: FaultPhase = "data"
    """Where in the step; or start and recovery: when the next generation begins."""
    seconds: float = Field(0.0, ge=0, le=3600)
    """slow: additional time in each step; partition: how long the rank cannot be reached."""
    delay: float = Field(0.0, ge=0, le=3600)
    """kill and stop: seconds from the beginning of the phase."""
    hold_gil: bool = False
    """hang: no other thread of the process runs either."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        takers = {"seconds": ("slow", "partition"), "delay": ("kill", "stop"), "hold_gil": ("hang",)}
        for name, kinds in takers.items():
            if getattr(self, name) and self.kind not in kinds:
                raise ValueError(f"{name} is for {' and '.join(kinds)} only, not for {self.kind}")
        if self.kind == "slow" and not self.seconds:
            raise ValueError("slow needs seconds: how much longer each step shall take")
        return self


class TraceRequest(Body):
    """A request to record steps of a job."""

    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_STEPS)] = 1
    """Number of steps."""
    step: Annotated[int, Field(strict=True, ge=0, le=2**53)] = 0
    """The first step is not before this one; default: as soon as possible."""
    profiler_ranks: Annotated[list[Annotated[int, Field(strict=True, ge=0, le=10**8)]], Field(max_length=8)] = []
    """Ranks whose operators and kernels torch's profiler records too, which makes them far slower."""


ProjectName = Annotated[str, Field(pattern=f"^{PROJECT_PATTERN}$", min_length=1, max_length=63)]
"""Lower-case letters, digits and hyphens."""
PersonalName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A name on one line."""


class NewProject(Body):
    """A project to create."""

    name: ProjectName
    """Name of the project, which cannot be changed."""


class NewKey(Body):
    """An API key to create."""

    name: PersonalName
    """What it is for."""
    scope: Scope
    """read: see jobs; submit: also submit, change and end them; admin: also manage keys and read the audit."""
    project: ProjectName | None = None
    """Project that it is bound to; default: that of the key that creates it."""
    user: PersonalName | None = None
    """The user it is for."""
    expires_in_days: float | None = Field(None, gt=0, le=36_500, allow_inf_nan=False)
    """Days until it expires; default: it does not."""
    installation: Annotated[bool, Field(strict=True)] = False
    """Valid for all projects. It submits into its own."""
    highest_priority: Priority | None = None
    """The highest priority that jobs submitted with it may have; default: that of the key that creates it."""


class DrainRequest(Body):
    """The body of a drain."""

    deadline_seconds: float = Field(default=120.0, ge=0, le=604_800, allow_inf_nan=False)
    """Seconds until the node goes away."""
