"""What to do after a failure, how often a job may fail, how long it is delayed when retries do not help, and which
nodes are avoided: pure functions of what is known. The supervisor carries the decisions out.

The failures that a job has survived are rows in the database: a restarted control plane decides as the previous one
would have. What was requested (a resize, a drain, a pause) is not a failure and costs nothing.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.tasks import backoff_after
from manta.workers.errors import failure_kind
from manta.workers.protocol.messages import Resume

UNREADABLE = "unreadable_checkpoint"
NOT_SAVED = "not_saved"
INITIAL_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 60.0
AVOID_FAILURES = 3
"""A node with this many machine failures is avoided."""
AVOID_SECONDS = 3600.0
"""How long such a failure counts against its node."""
SKEW_SECONDS = 60.0
"""How far the clocks of two nodes may differ."""


@dataclass(frozen=True)
class Death:
    """How one rank's trainer ended."""

    rank: int
    kind: str
    """A key of `manta.workers.errors.FAILURE_KINDS`."""
    step: int | None = None
    """Step that was being computed, if known."""
    exception: str | None = None
    """Class of the exception."""
    message: str = ""
    """One line: what the rank did, or a sentence if its kind's messages are."""
    traceback: str = ""
    """The trainer's traceback."""
    at: float | None = None
    """When it happened, Unix seconds, as its agent saw it."""

    @property
    def sentence(self) -> str:
        """A sentence for events and messages."""
        if failure_kind(self.kind).is_sentence and self.exception is not None:
            return f"rank {self.rank} failed: {self.message}"
        where = f" at step {self.step}" if self.step is not None else ""
        return f"rank {self.rank} {self.message or self.kind}{where}"


def describe_exit(code: int | None, number: int | None, memory_kills: int | None = None) -> str:
    """How a process ended, in words. `memory_kills`: see `Exited`."""
    if number is not None:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"was killed ({name}{_cause(number, memory_kills)})"
    return f"exited with code {code}" if code is not None else "is gone"


def _cause(number: int, memory_kills: int | None) -> str:
    if number == signal.SIGBUS:
        return ": a file that it maps, of weights or in /dev/shm, was truncated, or its disk or mount failed"
    if number != signal.SIGKILL:
        return ""
    if memory_kills is None:
        return ": out of memory, unless a user sent the signal"
    if memory_kills <= 0:
        return "; not the OOM killer"
    processes = "a process" if memory_kills == 1 else f"{memory_kills} processes"
    return f": out of memory; the OOM killer has ended {processes} of its machine since it started"


def culprit_of(deaths: Sequence[Death]) -> Death:
    """The death that caused the others: the first, in order of arrival, that is neither a consequence (a lost peer) nor
    caused by us; otherwise the first that says what was lost. `deaths` is not empty."""
    for consequences in (("peer_lost", "stopped"), ("stopped",)):
        for death in deaths:
            if death.kind not in consequences:
                return death
    return deaths[0]


@dataclass(frozen=True)
class Restart:
    """Start the next generation."""

    cause: str
    """One sentence."""
    wait_seconds: float = 0.0
    """How long to delay it."""


@dataclass(frozen=True)
class GiveUp:
    """The job fails."""

    reason: str
    message: str


def decide(
    culprit: Death,
    failure: PastFailure,
    history: Sequence[PastFailure],
    max_restarts: int,
    window_seconds: float,
    failed_launches: int = 0,
) -> Restart | GiveUp:
    """Restart or give up after `culprit`'s death, which is `failure`, when the job has survived `history`. An exception
    that is raised again at the same step is the user's error, not the machine's. `max_restarts` failures are allowed
    within `window_seconds` (0: ever), and the same number of launches may fail in a row, however long ago the first of
    them was; `failed_launches`: how many have, including this one. What is waited out does not count."""
    if failed_launches > max_restarts:
        message = f"could not be launched {failed_launches} times in a row; last failure: {culprit.sentence}"
        return GiveUp("restarts_exhausted", message)
    if failure_kind(culprit.kind).is_hopeless:
        return GiveUp(culprit.kind, culprit.message)
    if recurs(history, failure):
        return GiveUp(
            "user_error", f"{culprit.sentence}; it has failed twice at this step\n{culprit.traceback}".strip()
        )
    if _is_waited_out(failure):
        return Restart(culprit.sentence, wait_seconds(history, failure))
    counted = [each for each in within(history, failure.at, window_seconds) if not _is_waited_out(each)]
    if len(counted) >= max_restarts:
        kinds = f" ({count_by_kind(counted)})" if counted else ""
        recently = f" in {window_seconds:g} s" if counted and window_seconds else ""
        message = (
            f"restarted {len(counted)} times{recently}{kinds}; last failure: {culprit.sentence}\n{culprit.traceback}"
        )
        return GiveUp("restarts_exhausted", message.strip())
    return Restart(culprit.sentence, wait_seconds(history, failure))


def _is_waited_out(failure: PastFailure) -> bool:
    """Whether a failure is of the storage or of a node's limits alone: a checkpoint or data that cannot be read at the
    moment, a node that gives no more threads or files, a last checkpoint that cannot be saved in a generation that had
    nothing else left to do, or tokens that cannot be stored before the first step. What could not be stored after
    training does count, since without snapshots its steps are repeated each time."""
    counts = failure.kind == NOT_SAVED and failure.progressed
    return bool(failure_kind(failure.kind).waits_until) and not counts


def failure_of(death: Death, at: float, committed: int, progressed: bool, node: str | None = None) -> PastFailure:
    """A death together with what else is known: the job's last committed step, whether its generation had committed
    one, and the node. `at` (Unix seconds) is used if the death itself does not say when it was."""
    when = at if death.at is None else min(at, death.at)
    return PastFailure(death.kind, when, death.step, death.exception, death.rank, node, committed, progressed)


def snapshot_source(step: int) -> str:
    """Name for the snapshots of one step among the unusable sources: the other slot may be usable."""
    return f"snapshot of step {step}"


SUSPECTED = "snapshots that differ"
"""A member of the unusable sources that stands for all snapshots: what is left is a checkpoint, of which all ranks read
the same, or no state."""


def choose_resume(
    snapshots: Sequence[Iterable[int]],
    checkpoints: Sequence[tuple[int, str]],
    unusable: Iterable[str] = (),
    others: Sequence[tuple[int, list[str]]] = (),
) -> Resume:
    """The newest state that all ranks can reach.

    `snapshots`: for each rank the steps complete in its shared memory; `checkpoints`: (step, path) of the durable ones,
    oldest first; `unusable`: paths that could not be read, "snapshot", SUSPECTED, or the `snapshot_source` of one step;
    `others`: (step, paths) of what ranks of other layouts left in shared memory. For the same step a snapshot is
    preferred to those, and they to a checkpoint: the nearest source wins.
    """
    bad = set(unusable)
    usable = [(step, path) for step, path in checkpoints if path not in bad]
    newest = usable[-1] if usable else None
    in_doubt = not bad.isdisjoint({"snapshot", SUSPECTED})
    common = set.intersection(*(set(steps) for steps in snapshots)) if snapshots and not in_doubt else set()
    common = {step for step in common if snapshot_source(step) not in bad}
    foreign = [other for other in others if not in_doubt and snapshot_source(other[0]) not in bad]
    left = max(foreign, key=lambda other: other[0], default=None)
    in_memory = max([*common, *([left[0]] if left else [])], default=None)
    if in_memory is not None and (newest is None or in_memory >= newest[0]):
        if in_memory in common or left is None:
            return Resume("snapshot", in_memory)
        return Resume("memory", in_memory, paths=tuple(left[1]))
    if newest is not None:
        return Resume("checkpoint", newest[0], newest[1])
    return Resume()


def unusable_sources(
    generations: Sequence[GenerationRow], last_kind: str | None, last_step: int | None = None
) -> set[str]:
    """What no generation can resume from, in the form that `choose_resume` takes.

    These are the sources from which a generation resumed that ended because it could not read them; `last_kind` is the
    kind of death that ended the last generation, `last_step` the step that was computed then. Snapshots are taken
    again, so they are usable again once a step was committed. A checkpoint that the system did not provide
    (`unreadable_checkpoint`) is not included: it is waited for.

    If ranks that ought to be equal differ twice at one step, they already differed in their snapshots.
    """
    failures = [(row.data or {}).get("failure") or {} for row in generations[1:]]
    ends = [*((failure.get("kind"), failure.get("step")) for failure in failures), (last_kind, last_step)]
    unusable: set[str] = set()
    differed_at: int | None = None
    for row, (ended_by, step) in zip(generations, ends, strict=False):
        if row.first_step_at is not None:
            unusable = {source for source in unusable if not source.startswith("snapshot")}
        if ended_by == "bad_checkpoint":
            unusable.add(str((row.data or {}).get("resume_path") or snapshot_source(row.resume_step)))
        if ended_by == "corrupt":
            if step is not None and step == differed_at:
                unusable.add(SUSPECTED)
            differed_at = step
    return unusable


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
    """Which of `failures` still count against the budget at `now`; a window of 0 never forgets. Failures later than
    `now` do not count: the clock was set back since, and the window, which would reach back further by the same amount,
    would count failures over more than its own length."""
    if window_seconds <= 0:
        return list(failures)
    return [failure for failure in failures if now - window_seconds < failure.at <= now + SKEW_SECONDS]


def count_by_kind(failures: Iterable[PastFailure]) -> str:
    """A text such as `3 killed, 1 exception`."""
    return ", ".join(
        f"{count} {kind.replace('_', ' ')}" for kind, count in Counter(f.kind for f in failures).most_common()
    )


def wait_seconds(history: Sequence[PastFailure], failure: PastFailure) -> float:
    """How long to delay the next generation after `failure`. Not at all if a step was committed since the previous
    failure, or if that was of another kind: the first repair is immediate, and repairs that help never wait. Otherwise
    the delay doubles each time the same failure comes again without progress, up to a minute. There is no jitter: one
    control plane owns the job, so there are no competitors to avoid."""
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


@dataclass(frozen=True)
class Incident:
    """What the supervisor knows from the death of a rank to the launch of the next generation."""

    culprit: Death
    """The death that caused everything else."""
    failure: PastFailure
    """The culprit's death as a past failure, for later decisions."""
    timeline: RecoveryTimeline
    """When its phases ended, so far."""
    wait_seconds: float = 0.0
    """Seconds that the next generation was held back."""


class FailureHistory:
    """The failures that one job has survived."""

    def __init__(self, retried_at: float):
        self.retried_at = retried_at
        """When the user last had it retried, in Unix seconds: earlier failures do not count."""
        self.failed_launches: list[PastFailure] = []
        """Failed launches since the last successful one: such failures have no rows."""

    def failures(self, lives: Sequence[GenerationRow], incident: Incident | None = None) -> list[PastFailure]:
        """All that count, oldest first. `lives`: the job's generations; `incident`: caused the launch that is to be
        retried, and has no row yet."""
        known = past_failures([life for life in lives if life.started_at > self.retried_at])
        if incident is not None and incident.failure not in (*known, *self.failed_launches):
            known.append(incident.failure)
        return [*known, *self.failed_launches]
