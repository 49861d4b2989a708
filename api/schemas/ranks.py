"""Responses of the REST API about the ranks of a job: placement, state, and which ranks wait for which."""

from __future__ import annotations

from manta.api.schemas.base import Answer, Time


class RankPlace(Answer):
    """A rank's coordinates in the layout."""

    rank: int
    """Global rank."""
    tensor: int
    """Index in its tensor group."""
    pipeline: int
    """Pipeline stage."""
    data: int
    """Index of its replica."""
    context: int
    """Index in its context group."""


class Straggler(Answer):
    """Evidence that a rank slows down the others."""

    own_seconds: float
    """Median time per step of the rank's own work over the last steps."""
    usual_seconds: float
    """Median time per step of the own work of the ranks of the same stage over the last steps."""
    sentence: str
    """Description for users."""


class Rank(RankPlace):
    """A rank's coordinates in the layout and its placement in the cluster."""

    node: str | None
    """Node that it runs on."""
    device: str | None
    """Device that it runs on."""
    pid: int | None
    """Process id of its trainer; null if none runs."""
    generation: int
    """Generation of its trainer."""
    state: str
    """State of the rank."""
    own_seconds: float | None = None
    """Time per step that it did not wait for other ranks: mean over the last seconds; null if unknown."""
    wait_seconds: float | None = None
    """Time per step, of the same steps, that it waited for other ranks until all ranks agreed."""
    memory_bytes: int | None = None
    """Memory in use by the rank, to seven digits."""
    straggler: Straggler | None = None
    """Null if it does not slow down the others."""


class WaitingRank(Answer):
    """State of one rank."""

    rank: int
    phase: str
    """Phase, such as forward, backward, reduction, agreement; exited if it has no trainer, unknown if it did not
    answer."""
    doing: str
    """Description of the phase, with the communication that it waits for."""
    since_seconds: float | None
    """How long it has made no progress; null if unknown."""
    waits_for: list[int]
    """Ranks that it waits for, as far as known."""
    step: int | None
    """Step that it is computing."""


class Waits(Answer):
    """Which ranks wait for which."""

    at: Time
    """When all ranks were queried."""
    ranks: list[WaitingRank]
    """Sorted by rank."""
    culprits: list[int]
    """Ranks that block the others and have made no progress for longer than allowed."""
    sentence: str
    """Summary for users."""


class RankStack(Answer):
    """The stack of a rank's trainer."""

    rank: int
    pid: int
    """Process id of its trainer."""
    at: Time
    """When it was recorded."""
    text: str
    """The Python stacks of all its threads; for a stopped process, what the kernel reports."""


class RankHistory(Answer):
    """Time of all ranks over the last samples."""

    steps: list[int]
    """The last step of each sample, ascending."""
    times: list[Time]
    """Time of each sample."""
    own_seconds: list[list[float]]
    """For each sample and rank: time per step that the rank did not wait for others."""


class Fault(Answer):
    """A fault to be injected. The event `fault_injected` reports the request, and `fault_struck` that it has
    happened."""

    id: str
    """Id in the job's events."""
    message: str
    """Description for users."""
