"""The measurements of a calibration, before anything is fitted to them. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from manta.workers.config import JobSpec


@dataclass(frozen=True)
class ProductTime:
    """One matrix product."""

    name: str
    """forward, input (its gradient) or weight (its gradient, added to a sum)."""
    precision: str
    """Data type of the factors, as torch calls it: float32, bfloat16; tf32 for float32 rounded by tensor cores."""
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
    """Seconds of forward alone; None if it was not measured."""


UPDATE = "update"
"""The kind of row for a GPU's work per parameter at the end of a step: several kernels, unlike the others."""


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
    """Processor time of a core, or time of the device."""


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
    """Processor time of a core."""


@dataclass(frozen=True)
class Measurements:
    """All measurements of a machine."""

    device: str
    """Name of the accelerator, or of the processor."""
    cores: int
    """Cores that the ranks share; on a GPU node, those of the host."""
    products: list[ProductTime] = field(default_factory=list)
    attention: list[AttentionTime] = field(default_factory=list)
    steps: list[StepSeconds] = field(default_factory=list)
    collectives: list[CollectiveTime] = field(default_factory=list)
    """For GPUs none, if they could not be measured."""
    busy: list[BusyTime] = field(default_factory=list)
    """The row of one rank comes first."""
    elements: list[ElementTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    gpu_memory_bytes: int | None = None
    """GPUs only; None: a processor was measured."""
    adds_wider: bool = False
    """Whether products there add 16-bit gradients to fp32 sums themselves."""
    other_cores: float | None = None
    """Mean number of cores that other work used meanwhile; None: not known."""
    spread: float | None = None
    """Median, over all measurements, of the interquartile range of repetitions over their median. None: not known."""
    links_problem: str | None = None
    """GPUs only: why there are no collectives; None if there are."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Measurements:
        """From what `dataclasses.asdict` returned. Raises KeyError, TypeError."""
        kinds: dict[str, Any] = {
            "products": ProductTime,
            "attention": AttentionTime,
            "steps": StepSeconds,
            "collectives": CollectiveTime,
            "busy": BusyTime,
            "elements": ElementTime,
            "copies": CopyTime,
        }
        return cls(**document | {name: [kind(**row) for row in document[name]] for name, kind in kinds.items()})


SMALL = 256
"""Largest hidden size with which a step on a GPU is bound by the host."""


def step_job(step: StepSeconds) -> JobSpec:
    """The job of a measured step."""
    return JobSpec.model_validate(step.document)
