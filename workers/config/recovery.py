"""`checkpoint`, `recovery`: what is kept of a job, and what follows from a failure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.config.fields import LEAST_WINDOW, Count, MayBeOff, PositiveFloat, Section, Steps, StepsOrNever


class CheckpointConfig(Section):
    """When state is kept, in memory and on disk."""

    every_steps: StepsOrNever = 50
    """Steps between durable checkpoints; the last step is always saved. 0: none but those of a pause. One that is due
    while the one before is still being written waits for that, and the training does not."""
    keep: Steps = 3
    """Newest durable checkpoints kept; older ones are deleted after a newer one is complete. Where a roll back could
    undo all of these, up to two from before are kept too."""
    snapshots: Annotated[Literal["auto", "shared_memory", "node_memory", "off"], MayBeOff] = "auto"
    """Where each rank keeps its last two snapshots, 24 bytes for each parameter whose moments it has, from which a job
    goes on after a failure. shared_memory: /dev/shm of the rank's node; node_memory: memory that the node's daemon
    holds, which no size of /dev/shm limits and which ends with the daemon; auto: shared memory, and where that has no
    room the daemon's, with an event; off: nowhere, so that whatever happens the job goes on from its newest durable
    checkpoint, also after a resize or a drain (docs/recovery.md)."""
    snapshot_every_steps: Steps | Literal["auto"] = "auto"
    """Steps between snapshots; the most that a crash makes a job redo (more only where it has just
    changed: `workers/snapshot/interval.py`). auto: 1, or more where making sure of each would take the training thread
    over 1 ms and over 1% of a step's time; `snapshot_every_steps` in the metrics is what it is at a step."""


class SpikeConfig(Section):
    """Steps whose loss or gradient norm is far above that of the steps before.

    A number is too high when it lies more than so many deviations above the median of the last `window` steps. A
    deviation is 1.4826 times their median distance from that median (as the standard deviation where they are
    normally distributed), and at least 5% of it.
    """

    policy: Literal["ignore", "report", "skip", "roll_back", "fail"] = "ignore"
    """What happens then. report: an event; skip, roll_back, fail: as for recovery.nonfinite, and like there the
    weights have not been touched."""
    window: Annotated[int, Field(ge=LEAST_WINDOW, le=500, strict=True)] = 50
    """Steps that are looked back at; before there are as many, no step is judged."""
    loss_deviations: PositiveFloat = 8.0
    """By how many deviations a loss must stand out."""
    grad_norm_deviations: PositiveFloat | None = 20.0
    """The same for the gradient's norm before clipping, which varies more; null: it is not looked at."""


class RecoveryConfig(Section):
    """What failures cost before the job gives up."""

    nonfinite: Literal["fail", "skip", "roll_back"] = "fail"
    """What happens when a step's loss or gradient is not finite, which is noticed before the weights are touched. fail:
    the job fails and names the samples; skip: the step passes without an update; roll_back: the job goes back
    `roll_back_steps` and skips the step's samples. Each is an event."""

    spike: SpikeConfig = SpikeConfig()
    """Numbers that are finite and still stand out."""

    roll_back_steps: Annotated[int, Field(gt=0, le=10_000, strict=True)] = 10
    """How many committed steps a roll back undoes at least, as far as the process reaches back: up to twice as many
    less one. They are done again with the same samples. With a policy of roll_back each rank keeps two copies of its
    state in host memory, one every so many steps."""

    max_roll_backs: Annotated[int, Field(gt=0, le=100, strict=True)] = 10
    """Roll backs in the life of the job; the next one fails it."""

    check_replicas_every: StepsOrNever = 100
    """Steps between comparisons of all parameters that ought to have the same bits on several ranks: one that differs
    was changed in memory or on its way, and the rank is replaced. 0: never."""

    stragglers: Literal["ignore", "report", "replace"] = "report"
    """What happens with a rank whose own work, without the time it waits for others, takes persistently longer than
    that of its peers in the same stage. report: an event names it with the evidence; replace: its process is also
    ended after the next committed step and replaced like a lost one, each rank at most once in ten minutes. Own work
    is known on CPUs only."""

    max_restarts: Count = 20
    """Failures that are survived within `restart_window_seconds` before the job fails with restarts_exhausted."""
    restart_window_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 86_400.0
    """How long a failure counts against `max_restarts`, in seconds; 0: forever. A job that runs for months meets more
    failures than any fixed number allows and is still worth going on with; one that fails 20 times a day is not."""

    @property
    def rolls_back(self) -> bool:
        """Whether any policy is to roll back, so that earlier states must be kept."""
        return "roll_back" in (self.nonfinite, self.spike.policy)

    @property
    def needs_history(self) -> bool:
        """Whether what follows from a step depends on the steps before: on their losses or on roll backs."""
        return self.rolls_back or self.spike.policy != "ignore"
