"""What a supervisor can do next. One function of the supervisor carries out each action, and returns the next."""

from __future__ import annotations

from dataclasses import dataclass

from manta.service.job.changes import Change
from manta.service.recovery.decisions import Death, Incident
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState


@dataclass(frozen=True)
class Watch:
    """Watch the generation that runs until it ends, breaks, or is to be changed."""


@dataclass(frozen=True)
class Launch:
    """Begin the next generation with the agents that are there."""

    cause: str
    """Why, in words."""
    counts: bool
    """Whether it counts as a restart."""
    incident: Incident | None = None
    """The failure that made it necessary."""
    holds: int = 0
    """How many times it was postponed, since the state to resume from could not be read."""


@dataclass(frozen=True)
class Reacquire:
    """Give up all places of the gang, acquire others, and begin the next generation there."""

    launch: Launch


@dataclass(frozen=True)
class Recover:
    """Decide what follows a failure: another generation, or the end of the job."""

    culprit: Death
    """The death that caused everything else."""
    agents_lost: tuple[int, ...]
    """Ranks that need another agent."""
    timeline: RecoveryTimeline
    failed_launch: Launch | None = None
    """The launch that it made fail, before its generation had begun."""


@dataclass(frozen=True)
class Rearrange:
    """Bring all trainers to rest, and continue with another size or in other places."""

    change: Change


@dataclass(frozen=True)
class Requeue:
    """There is no place for the job: it goes back into the queue."""

    message: str


@dataclass(frozen=True)
class End:
    """The job is over."""

    state: JobState
    """A final state."""
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Leave:
    """Give all places back and keep the snapshots: because of a pause, because the job's time is up, or because its
    nodes are being drained and there is no room elsewhere."""


Action = Watch | Launch | Reacquire | Recover | Rearrange | Requeue | End | Leave


def while_leaving(action: Action, unlaunched: bool, overdue: bool, no_room: bool = False) -> Action:
    """What a job that is to leave does instead of `action`: what is needed to have its newest state saved, and no more.
    `unlaunched`: nothing was launched since it got its places, so there is nothing new to save; `overdue`: it has tried
    for long enough; `no_room`: it leaves since there is no room for it."""
    match action:
        case Watch() if overdue:
            return Leave()
        case Launch(holds=holds) if unlaunched or overdue or holds:  # held: its newest state is on disk, unreadable now
            return Leave()
        case Reacquire() if unlaunched or overdue or no_room:
            return Leave()
    return action


def launch_after(incident: Incident, cause: str, failed: Launch | None, first: bool) -> Launch:
    """The launch that follows `incident`, whose `cause` is in words. `failed`: the launch that it made fail, which is
    tried again; `first`: the job had no generation yet."""
    if failed is None:
        return Launch(cause, counts=True, incident=incident)
    if failed.incident is not None or first:
        return failed
    return Launch(f"{failed.cause}, and {cause}", counts=True, incident=incident)  # it was for a change
