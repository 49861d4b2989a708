"""What a calibration has measured, before anything is fitted on it. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from workers.config import JobSpec


@dataclass(frozen=True)
class ProductTime:
    """One matrix product."""

    name: str
    """forward, input (its gradient) or weight (its gradient, added to a sum)."""
    precision: str
    """Of its factors, as torch calls it: float32, bfloat16; tf32 for float32 that tensor cores round."""
    n: int
    i: int
    o: int
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.n * self.i * self.o / self.seconds


@dataclass(frozen=True)
class AttentionTime:
    """Forward and backward of fused attention, together."""

    batch: int
    heads: int
    sequence: int
    head_size: int
    seconds: float
    forward_seconds: float | None = None
    """Of forward alone; None where it was not measured."""


UPDATE = "update"
"""What a GPU does with each parameter at the end of a step: of several kernels, unlike the others."""


@dataclass(frozen=True)
class ElementTime:
    """An element-wise kernel of a GPU."""

    name: str
    moved: int
    """Bytes that it reads and writes."""
    seconds: float


@dataclass(frozen=True)
class CopyTime:
    """A copy between a GPU and pinned memory of its host."""

    direction: Literal["to_device", "to_host"]
    size: int
    """Bytes."""
    seconds: float


@dataclass(frozen=True)
class StepSeconds:
    """A whole step of the engine on one rank."""

    document: dict[str, Any]
    """The job."""
    seconds: float
    """Of a core's time, or of the device's."""


ExchangeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "message"]


@dataclass(frozen=True)
class CollectiveTime:
    """A collective between ranks of this node, or a message from each of them to the next; on cores what it adds to the
    products between which it comes."""

    kind: ExchangeKind
    ranks: int
    size: int
    """Bytes of the whole tensor, or of each message."""
    seconds: float


@dataclass(frozen=True)
class BusyTime:
    """A step of the engine on one rank while others do the same, each for itself."""

    ranks: int
    seconds: float
    """Of a core's time."""


@dataclass(frozen=True)
class Measurements:
    """Everything."""

    device: str
    """Name of the accelerator, or of the processor."""
    cores: int
    """Cores that the ranks share; of a GPU's host."""
    products: list[ProductTime] = field(default_factory=list)
    attention: list[AttentionTime] = field(default_factory=list)
    steps: list[StepSeconds] = field(default_factory=list)
    collectives: list[CollectiveTime] = field(default_factory=list)
    """Of GPUs none where they could not be measured."""
    busy: list[BusyTime] = field(default_factory=list)
    """With one rank first."""
    elements: list[ElementTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    gpu_memory_bytes: int | None = None
    """Of a GPU; None: a processor was measured."""
    adds_wider: bool = False
    """Whether products there add 16-bit gradients to fp32 sums themselves."""
    other_cores: float | None = None
    """Cores that others kept busy meanwhile, as a mean; None: not known."""
    spread: float | None = None
    """How far repetitions were apart: between their quarters, of their median, and of these the median. None: not
    known."""
    links_problem: str | None = None
    """Of a GPU, why there are no collectives; None where there are."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Measurements:
        """What `dataclasses.asdict` made of one. Raises KeyError, TypeError."""
        kinds = {
            "products": ProductTime,
            "attention": AttentionTime,
            "steps": StepSeconds,
            "collectives": CollectiveTime,
            "busy": BusyTime,
            "elements": ElementTime,
            "copies": CopyTime,
        }
        lists: dict[str, Any] = {name: [kind(**row) for row in document[name]] for name, kind in kinds.items()}
        others: dict[str, Any] = {
            name: document[name] for name in ("device", "cores", "gpu_memory_bytes", "adds_wider")
        }
        others |= {name: document.get(name) for name in ("other_cores", "spread", "links_problem")}
        return cls(**others, **lists)


SMALL = 256
"""Hidden size up to which the time of a GPU's step is its host's."""


def step_job(step: StepSeconds) -> JobSpec:
    """The job of a measured step."""
    return JobSpec.model_validate(step.document)
