"""The job state machine, as data: states, edges, and what a user may ask for in which state. Pure Python."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life. Each state that is not final has one owner loop and a way out."""

    QUEUED = "QUEUED"
    """Waits for its turn or for capacity; owned by the scheduler."""
    STARTING = "STARTING"
    """Being placed and launched; owned by the job's supervisor, like all states up to CANCELLING."""
    RUNNING = "RUNNING"
    """Commits steps."""
    RECOVERING = "RECOVERING"
    """Something died; the next generation is on its way."""
    RESIZING = "RESIZING"
    """Changes its number of replicas; the next generation is on its way."""
    CANCELLING = "CANCELLING"
    """The user asked to stop; processes are being ended."""
    SUCCEEDED = "SUCCEEDED"
    """All steps are committed."""
    FAILED = "FAILED"
    """Given up; reason and message say why. A user may have it tried again."""
    CANCELLED = "CANCELLED"
    """Stopped by the user."""


_S = JobState

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, _S.CANCELLING, _S.FAILED, _S.SUCCEEDED}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.RESIZING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.RESIZING, _S.QUEUED, _S.CANCELLING, _S.FAILED, _S.SUCCEEDED}),
    _S.RESIZING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, _S.CANCELLING, _S.FAILED, _S.SUCCEEDED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset(),
}
"""Edges of the state machine. Nothing else ever happens to a job's state."""

FINAL: frozenset[JobState] = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED})
"""States that no job leaves by itself."""

TIME_LIMITS: dict[JobState, float] = {
    _S.STARTING: 300.0,
    _S.RECOVERING: 300.0,
    _S.RESIZING: 300.0,
    _S.CANCELLING: 120.0,
}
"""Seconds in which a job leaves a state, given a database, a Ray and checkpoints that answer and places for its ranks:
nothing that is waited for there is waited for without a limit of its own. Not QUEUED, which waits for places, and not
RUNNING, where what stands still is found by the hang detection of each rank."""

ACTIONS: dict[str, dict[JobState, JobState]] = {
    "cancel": {
        _S.QUEUED: _S.CANCELLED,  # nothing runs yet, so there is nothing to wait for
        _S.STARTING: _S.CANCELLING,
        _S.RUNNING: _S.CANCELLING,
        _S.RECOVERING: _S.CANCELLING,
        _S.RESIZING: _S.CANCELLING,
        _S.CANCELLING: _S.CANCELLING,  # asked for again, by who did not hear the answer
    },
    "resize": {
        # Only a wish at first: what becomes of it depends on what there is room for.
        state: state
        for state in (_S.QUEUED, _S.STARTING, _S.RUNNING, _S.RECOVERING, _S.RESIZING)
    },
    "retry": {_S.FAILED: _S.QUEUED},
}
"""For each action of a user: the states in which it is legal, and the state that it leads to at once."""

STATE_NAMES: tuple[str, ...] = (
    *(state.value for state in JobState if state not in FINAL),
    "PAUSING",
    "PAUSED",
    *(state.value for state in JobState if state in FINAL),
)
"""All state names of the REST contract. No job is PAUSING or PAUSED today, but asking for such is legal."""


def can(source: JobState, target: JobState) -> bool:
    """Whether a job in `source` may go to `target`."""
    return target in TRANSITIONS[source]


def is_final(state: JobState | str) -> bool:
    """Whether a job in `state` will not change by itself any more. Raises ValueError for a name that is no state."""
    return JobState(state) in FINAL


def after_action(action: str, state: JobState) -> JobState | None:
    """The state that a user's `action` leads to from `state`; None where it is illegal."""
    return ACTIONS[action].get(state)
