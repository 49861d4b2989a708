"""What a rank asks of its process groups, as a list: the program that `nccl_rules.py` replays.

A program is what the training thread's host issues, in its order. `Start` puts an operation into the stream of its
communicator, behind what the compute stream has been given so far; `Wait` has the compute stream wait for its end;
`Use` is the next kernel of the compute stream that touches memory of an operation; in `Meet` hosts wait for each other.
A host that waits for its device is not written down: it waits for what is in front of it, as everything does in the
replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce sum", "all_reduce max", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Communicator:
    """One NCCL communicator: that of a group, or of two of its ranks for messages that are not sent in a batch."""

    group: str
    """The group's name, the same on all its ranks."""
    ranks: tuple[int, ...]
    """Global, in order."""

    def __str__(self) -> str:
        return f"{self.group} {list(self.ranks)}"


@dataclass(frozen=True)
class Message:
    """One end of a message between two ranks."""

    sends: bool
    peer: int
    bytes: int
    label: str = ""
    """What it carries, in words that both ends say alike; empty where they do not know."""

    def __str__(self) -> str:
        which = f" ({self.label})" if self.label else ""
        return f"{'send to' if self.sends else 'receive from'} {self.peer}, {self.bytes} bytes{which}"


@dataclass(frozen=True)
class Sum:
    """A collective of all ranks of a communicator."""

    kind: Collective
    type: str
    """Of the elements."""
    bytes: int
    """Of this rank's part, which is the input of a gathering and the output of a scattering."""
    place: tuple[int, int] | None = None
    """First byte and all bytes of the memory that the result lies in; None where it may differ between ranks."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes} bytes of {self.type}"


@dataclass(frozen=True)
class Start:
    """An operation is put into the stream of its communicator. Several messages are one batch."""

    number: int
    """Of the rank's operations."""
    on: Communicator
    what: Sum | tuple[Message, ...]
    line: str

    @property
    def text(self) -> str:
        """For people."""
        return str(self.what) if isinstance(self.what, Sum) else " and ".join(map(str, self.what))


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the end of an operation."""

    number: int
    line: str


@dataclass(frozen=True)
class Use:
    """The compute stream touches the memory of an operation: writes it, or reads what the operation writes."""

    number: int
    line: str


@dataclass(frozen=True)
class Meet:
    """The hosts of these ranks wait for each other: they make a group, or its communicator at its first use."""

    name: str
    ranks: tuple[int, ...]
    line: str


Entry = Start | Wait | Use | Meet
Program = list[Entry]
