"""Where a trainer stands, as its agent tells the control plane. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.liveness.progress import DeviceRecord, Phase, Record
from workers.system.processes import ProcessState


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
        return cls(**record.to_json(), device=device)


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
