"""Ranks of a job: where they run, how they are doing, who waits for whom."""

from __future__ import annotations

from api.schemas.base import Answer, Time


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
    """A rank that slows down the others."""

    own_seconds: float
    """Of a step: its median over the last steps."""
    usual_seconds: float
    """The same of its peers."""
    sentence: str
    """The same in words."""


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
    """Seconds of a step in which it did not wait for others, mean over the last few; null where that is not known."""
    wait_seconds: float | None = None
    """Seconds that it waited in the same steps, up to where all ranks agree."""
    memory_bytes: int | None = None
    """In use by it, to seven digits."""
    straggler: Straggler | None = None
    """Null where it does not slow down the others."""


class WaitingRank(Answer):
    """Where one rank stands."""

    rank: int
    phase: str
    """Such as forward, backward, reduction, agreement; exited without a trainer, unknown without an answer."""
    doing: str
    """The same in words, with the communication that it waits in."""
    since_seconds: float | None
    """For how long nothing has changed; null where that is not known."""
    waits_for: list[int]
    """Ranks that it waits for, as far as that is known."""
    step: int | None
    """Step that it computes."""


class Waits(Answer):
    """Who waits for whom."""

    at: Time
    """When all were asked."""
    ranks: list[WaitingRank]
    """By number."""
    culprits: list[int]
    """Ranks that block the others and have made no progress within their timeout."""
    sentence: str
    """What that means, in words."""


class RankStack(Answer):
    """Where a rank's trainer is."""

    rank: int
    pid: int
    """Process id of its trainer."""
    at: Time
    """When it was asked."""
    text: str
    """The Python stacks of all its threads; of a stopped process what the kernel reports."""


class RankHistory(Answer):
    """How all ranks were doing over the last samples."""

    steps: list[int]
    """The last step of each sample, ascending."""
    times: list[Time]
    """When each was put together."""
    own_seconds: list[list[float]]
    """By sample and rank: seconds of a step in which the rank did not wait for others."""


class Fault(Answer):
    """A fault that will be injected. The event `fault_injected` records it, and `fault_struck` that it has happened."""

    id: str
    """Its id in the job's events."""
    message: str
    """What it is, in words."""
