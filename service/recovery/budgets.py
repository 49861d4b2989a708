"""How often a job may fail, how long it is delayed when retries do not help, and which nodes are avoided.

Pure functions of the failures that the job has survived, which are rows in the database: a restarted control plane
decides as the previous one would have. What was requested (a resize, a drain, a pause) is not a failure and costs
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from manta.service.backoff import backoff_after
from manta.workers.errors import failure_kind

INITIAL_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 60.0
AVOID_FAILURES = 3
"""A node with this many machine failures is avoided."""
AVOID_SECONDS = 3600.0
"""How long such a failure counts against its node."""
SKEW_SECONDS = 60.0
"""How far the clocks of two nodes may differ."""


@dataclass(frozen=True)
class PastFailure:
    """One failure that a job survived, or that is about to be judged."""

    kind: str
    """A key of `manta.workers.errors.FAILURE_KINDS`."""
    at: float
    """Unix seconds."""
    step: int | None = None
    """Step that was being computed, if known."""
    exception: str | None = None
    """Class of the exception, if it was one."""
    rank: int | None = None
    """The rank at fault."""
    node: str | None = None
    """Id of the node that it ran on."""
    committed: int = 0
    """The job's last committed step at that time."""
    progressed: bool = True
    """Whether a step had been committed since the previous failure, or since the job's start."""

    @property
    def cause(self) -> str:
        """What was to blame: machine, user or checkpoint."""
        return failure_kind(self.kind).cause

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class GenerationRow(Protocol):
    """The fields of a generation that are read here; its row has them."""

    started_at: float
    first_step_at: float | None
    resume_step: int
    data: dict[str, Any]


def past_failures(generations: Sequence[GenerationRow]) -> list[PastFailure]:
    """The failures that led from one generation to the next, oldest first; `generations` are in order."""
    known = [field for field in PastFailure.__dataclass_fields__ if field not in ("at", "progressed")]
    failures = []
    for before, row in pairwise(generations):
        stored = (row.data or {}).get("failure")
        if stored is not None:
            values = {name: stored[name] for name in known if name in stored}
            at = float(row.started_at if stored.get("at") is None else stored["at"])
            failures.append(PastFailure(**values, at=at, progressed=before.first_step_at is not None))
    return failures


def within(failures: Iterable[PastFailure], now: float, window_seconds: float) -> list[PastFailure]:
    """Which of `failures` still count against the budget at `now`; a window of 0 never forgets.

    Failures later than `now` do not count: the clock was set back since, and the window, which would reach back further
    by the same amount, would count failures over more than its own length.
    """
    if window_seconds <= 0:
        return list(failures)
    return [failure for failure in failures if now - window_seconds < failure.at <= now + SKEW_SECONDS]


def count_by_kind(failures: Iterable[PastFailure]) -> str:
    """A text such as `3 killed, 1 exception`."""
    return ", ".join(
        f"{count} {kind.replace('_', ' ')}" for kind, count in Counter(f.kind for f in failures).most_common()
    )


def wait_seconds(history: Sequence[PastFailure], failure: PastFailure) -> float:
    """How long to delay the next generation after `failure`.

    Not at all if a step was committed since the previous failure, or if that was of another kind: the first repair is
    immediate, and repairs that help never wait. Otherwise the delay doubles each time the same failure comes again
    without progress, up to a minute. There is no jitter: one control plane owns the job, so there are no competitors to
    avoid.
    """
    repeats, later = 0, failure
    for earlier in reversed(history):
        if later.progressed or earlier.kind != failure.kind:
            break
        repeats, later = repeats + 1, earlier
    return backoff_after(repeats - 1, INITIAL_WAIT_SECONDS, MAX_WAIT_SECONDS) if repeats else 0.0


def avoided_nodes(history: Iterable[PastFailure], now: float) -> set[str]:
    """Nodes on which this job keeps having machine failures: three in an hour."""
    recent = [f.node for f in within(history, now, AVOID_SECONDS) if f.cause == "machine" and f.node is not None]
    return {node for node, count in Counter(recent).items() if count >= AVOID_FAILURES}


def recurs(history: Sequence[PastFailure], failure: PastFailure) -> bool:
    """Whether an exception was raised at the same step before, however many other failures happened in between. It was
    in another process then, since every exception ends its process. Not if the job got past that step in the meantime:
    then the exception is not certain to come again."""
    if failure.kind != "exception":
        return False
    for earlier in reversed(history):
        if (earlier.kind, earlier.step, earlier.exception) == (failure.kind, failure.step, failure.exception):
            return True
        if failure.step is not None and earlier.committed >= failure.step:
            return False
    return False
