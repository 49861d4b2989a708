"""The job state machine, as data: states, edges, and what a user may ask for in which state. Pure Python."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life. Each state that is not final has one owner loop and a way out, but for PAUSED, which
    only its user ends."""

    QUEUED = "QUEUED"
    """Waits for its turn or for capacity; owned by the scheduler."""
    STARTING = "STARTING"
    """Being placed and launched; owned by the job's supervisor, like all states up to CANCELLING."""
    RUNNING = "RUNNING"
    """Commits steps."""
    RECOVERING = "RECOVERING"
    """Something died; the next generation is on its way."""
    RESIZING = "RESIZING"
    """Changes its number of replicas or its places, and the next generation is on its way; or saves its state, since
    its nodes are being drained and there is no room elsewhere, and waits in the queue then."""
    PAUSING = "PAUSING"
    """The user asked for a pause; the state is being saved and the places are given back."""
    PAUSED = "PAUSED"
    """Holds its snapshots and no places until the user resumes it; owned by nobody, since nothing is to be done."""
    CANCELLING = "CANCELLING"
    """The user asked to stop; processes are being ended."""
    SUCCEEDED = "SUCCEEDED"
    """All steps are committed."""
    FAILED = "FAILED"
    """Given up; reason and message say why. A user may have it tried again."""
    CANCELLED = "CANCELLED"
    """Stopped by the user."""


_S = JobState
_ENDS = (_S.CANCELLING, _S.SUCCEEDED, _S.FAILED)

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.PAUSED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.RESIZING, *_ENDS, _S.PAUSING}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.RESIZING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.RESIZING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, *_ENDS, _S.PAUSING}),
    _S.PAUSING: frozenset({_S.PAUSED, *_ENDS}),  # it may commit its last step meanwhile, or fail for good
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset(),
}
"""Edges of the state machine. Nothing else ever happens to a job's state."""

FINAL: frozenset[JobState] = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED})
"""States that no job leaves by itself."""

UNFINISHED: frozenset[JobState] = frozenset(JobState) - FINAL
"""All others. In queries by these: no index helps to find what is *not* in a state."""

SUPERVISED: frozenset[JobState] = UNFINISHED - {_S.QUEUED, _S.PAUSED}
"""States in which a job may hold places, so that its supervisor owns it."""

PAUSABLE: tuple[JobState, ...] = (_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.RESIZING)
"""States from which a pause goes by way of PAUSING."""

TIME_LIMITS: dict[JobState, float] = {
    _S.STARTING: 300.0,
    _S.RECOVERING: 300.0,
    _S.RESIZING: 480.0,  # as PAUSING, where it saves its state for the queue
    _S.PAUSING: 480.0,  # `service.job.time_to_save.SAVE_SECONDS`, and what it takes to release everything
    _S.CANCELLING: 120.0,
}
"""Seconds in which a job leaves a state, given a database, a Ray and checkpoints that answer and places for its ranks:
nothing that is waited for there is waited for without a limit of its own. Not QUEUED, which waits for places, not
PAUSED, which waits for its user, and not RUNNING, where what stands still is found by the hang detection of each
rank."""

ACTIONS: dict[str, dict[JobState, JobState]] = {
    "cancel": {
        _S.QUEUED: _S.CANCELLED,  # nothing runs, so there is nothing to wait for
        _S.PAUSED: _S.CANCELLED,
        **dict.fromkeys((*PAUSABLE, _S.PAUSING), _S.CANCELLING),
        _S.CANCELLING: _S.CANCELLING,  # asked for again, by who did not hear the answer
    },
    "pause": {
        _S.QUEUED: _S.PAUSED,
        **dict.fromkeys(PAUSABLE, _S.PAUSING),
        _S.PAUSING: _S.PAUSING,
        _S.PAUSED: _S.PAUSED,
    },
    "resume": {_S.PAUSED: _S.QUEUED},
    "resize": {
        # Only a wish at first: what becomes of it depends on what there is room for.
        state: state
        for state in (_S.QUEUED, *PAUSABLE, _S.PAUSING, _S.PAUSED)
    },
    "retry": {_S.FAILED: _S.QUEUED},
}
"""For each action of a user: the states in which it is legal, and the state that it leads to at once."""

_OVER = "it is over, and there is nothing to"
ADVICE: dict[tuple[str, JobState], str] = {
    **{(action, state): f"{_OVER} {action}" for action in ("cancel", "pause", "resize") for state in FINAL},
    **{(action, _S.CANCELLING): "it is being cancelled" for action in ("pause", "resize")},
    ("resume", _S.QUEUED): "it waits for its turn and starts by itself",
    ("resume", _S.PAUSING): "wait until it is PAUSED, then resume it",
    ("resume", _S.FAILED): "`manta retry` continues it",
    **{("resume", state): "it is not paused, so it continues by itself" for state in PAUSABLE},
    ("retry", _S.PAUSED): "`manta resume` continues it",
    **{(action, _S.FAILED): "it holds no places; `manta retry` continues it" for action in ("pause", "resize")},
}
"""By action and state: what to do instead, or why there is nothing to do. Of an action that works in several states it
is all that is said; of any other, what is said beside the state in which it works."""

STATE_NAMES: tuple[str, ...] = tuple(JobState)
"""All state names of the REST contract."""


def can(source: JobState, target: JobState) -> bool:
    """Whether a job in `source` may go to `target`."""
    return target in TRANSITIONS[source]


def is_final(state: JobState | str) -> bool:
    """Whether a job in `state` will not change by itself any more. Raises ValueError for a name that is no state."""
    return JobState(state) in FINAL


def after_action(action: str, state: JobState) -> JobState | None:
    """The state that a user's `action` leads to from `state`; None where it is illegal."""
    return ACTIONS[action].get(state)
