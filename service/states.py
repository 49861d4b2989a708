"""The job state machine, as data: states, edges, and what a user may request in which state. Pure Python."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job. Each state that is not final has one owner loop and a way out, except PAUSED, which only its
    user ends."""

    QUEUED = "QUEUED"
    """Waits for its turn or for capacity; owned by the scheduler."""
    STARTING = "STARTING"
    """Being placed and launched; owned by the job's supervisor, like all states up to CANCELLING."""
    RUNNING = "RUNNING"
    """Commits steps."""
    RECOVERING = "RECOVERING"
    """Something died; the next generation is being started."""
    RESIZING = "RESIZING"
    """Either its number of replicas or its places change, and the next generation is being started; or its nodes are
    being drained and there is no room elsewhere: its state is being saved, and it waits in the queue after that."""
    PAUSING = "PAUSING"
    """The user asked for a pause; the state is being saved and the places are being given back."""
    PAUSED = "PAUSED"
    """Holds its snapshots and no places until the user resumes it; owned by nobody, since there is nothing to do."""
    CANCELLING = "CANCELLING"
    """The user asked to stop; processes are being ended."""
    SUCCEEDED = "SUCCEEDED"
    """All steps are committed."""
    FAILED = "FAILED"
    """Given up; reason and message say why. A user may retry it."""
    CANCELLED = "CANCELLED"
    """Stopped by the user."""


HELD = "held"
"""Reason code, and type of the event, of a job whose newest state cannot be read now: it waits until that can."""

_S = JobState
_ENDS = (_S.CANCELLING, _S.SUCCEEDED, _S.FAILED)

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.PAUSED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.RESIZING, *_ENDS, _S.PAUSING}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.RESIZING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.RESIZING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.PAUSING: frozenset({_S.PAUSED, *_ENDS}),  # it may still commit its last step, or fail for good
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset(),
}
"""Edges of the state machine. A job's state never changes in any other way."""

FINAL: frozenset[JobState] = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED})
"""States that no job leaves by itself."""

UNFINISHED: frozenset[JobState] = frozenset(JobState) - FINAL
"""All others. Queries use these, since no index helps to find what is *not* in a state."""

SUPERVISED: frozenset[JobState] = UNFINISHED - {_S.QUEUED, _S.PAUSED}
"""States in which a job may hold places, so that its supervisor owns it."""

PAUSABLE: tuple[JobState, ...] = (_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.RESIZING)
"""States from which a pause goes through PAUSING."""

TIME_LIMITS: dict[JobState, float] = {
    _S.STARTING: 300.0,
    _S.RECOVERING: 300.0,
    _S.RESIZING: 480.0,  # as PAUSING, when it saves its state for the queue
    _S.PAUSING: 480.0,  # `manta.service.job.leave.SAVE_SECONDS`, and the time to release everything
    _S.CANCELLING: 120.0,
}
"""Seconds in which a job leaves a state, provided that the database, Ray and checkpoints answer and there are places
for its ranks: every wait in these states has its own limit. Not QUEUED, which waits for places, not PAUSED, which waits
for its user, and not RUNNING, where the hang detection of each rank finds what stands still."""

ACTIONS: dict[str, dict[JobState, JobState]] = {
    "cancel": {
        _S.QUEUED: _S.CANCELLED,  # nothing runs, so there is nothing to wait for
        _S.PAUSED: _S.CANCELLED,
        **dict.fromkeys((*PAUSABLE, _S.PAUSING), _S.CANCELLING),
        _S.CANCELLING: _S.CANCELLING,  # requested again by a caller that did not get the answer
    },
    "pause": {
        _S.QUEUED: _S.PAUSED,
        **dict.fromkeys(PAUSABLE, _S.PAUSING),
        _S.PAUSING: _S.PAUSING,
        _S.PAUSED: _S.PAUSED,
    },
    "resume": {_S.PAUSED: _S.QUEUED},
    "resize": {
        # At first only a request: its outcome depends on the available room.
        state: state
        for state in (_S.QUEUED, *PAUSABLE, _S.PAUSING, _S.PAUSED)
    },
    "retry": {_S.FAILED: _S.QUEUED},
}
"""For each action of a user: the states in which it is legal, and the state that it leads to at once."""

_OVER = "it has ended, and there is nothing to"
ADVICE: dict[tuple[str, JobState], str] = {
    **{(action, state): f"{_OVER} {action}" for action in ("cancel", "pause", "resize") for state in FINAL},
    **{(action, _S.CANCELLING): "it is being cancelled" for action in ("pause", "resize")},
    ("resume", _S.QUEUED): "it is queued and starts by itself",
    ("resume", _S.PAUSING): "wait until it is PAUSED, then resume it",
    ("resume", _S.FAILED): "`manta retry` continues it",
    **{("resume", state): "it is not paused, so it continues by itself" for state in PAUSABLE},
    ("retry", _S.PAUSED): "`manta resume` continues it",
    **{(action, _S.FAILED): "it holds no slots; `manta retry` continues it" for action in ("pause", "resize")},
}
"""By action and state: what to do instead, or why there is nothing to do. For an action that is legal in several states
this is the whole message; for any other, it is added to the state in which the action is legal."""

STATE_NAMES: tuple[str, ...] = tuple(JobState)
"""All state names of the REST contract."""


def can(source: JobState, target: JobState) -> bool:
    """Whether a job in `source` may go to `target`."""
    return target in TRANSITIONS[source]


def is_final(state: JobState | str) -> bool:
    """Whether a job in `state` will not change by itself any more. Raises ValueError for a name that is not a state."""
    return JobState(state) in FINAL


def after_action(action: str, state: JobState) -> JobState | None:
    """The state that a user's `action` leads to from `state`; None if it is illegal."""
    return ACTIONS[action].get(state)
