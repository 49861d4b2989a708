"""`checkpoint`, `recovery`: which state of a job is kept, and how it responds to failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from manta.workers.config.fields import MIN_WINDOW, Count, FalseAsOff, PositiveFloat, Section, Steps, StepsOrNever


class CheckpointConfig(Section):
    """When state is saved, in memory and on disk."""

    every_steps: StepsOrNever = 50
    """Steps between durable checkpoints, written while training continues; the last step is always saved. 0: only when
    the job is paused."""
    keep: Steps = 3
    """Number of newest durable checkpoints to keep. If a rollback could undo all of these, up to two earlier ones are
    kept too."""
    snapshots: Annotated[Literal["auto", "shared_memory", "node_memory", "off"], FalseAsOff] = "auto"
    """Where each rank keeps its last two snapshots, which take 24 bytes per parameter whose moments it holds. auto:
    shared_memory, or node_memory if that has no room; shared_memory: /dev/shm of its node; node_memory: memory of the
    node's daemon, which is lost with the daemon; off: none, so that the job always continues from its newest durable
    checkpoint (docs/recovery.md)."""
    snapshot_every_steps: Steps | Literal["auto"] = "auto"
    """Steps between snapshots, and so the maximum number of steps that are redone after a crash. auto: 1, or more if
    each snapshot would stall training for more than 1 ms and 1% of a step (docs/recovery.md)."""


class SpikeConfig(Section):
    """Detection of steps whose loss or gradient norm is far above that of the preceding steps.

    A value is a spike if it lies more than the given number of deviations above the median of the last `window` steps.
    A deviation is 1.4826 times their median absolute deviation from that median (equal to the standard deviation if
    they are normally distributed), and at least 5% of the median.
    """

    policy: Literal["ignore", "report", "skip", "roll_back", "fail"] = "ignore"
    """Response to a spike. report: an event; skip, roll_back, fail: as for recovery.nonfinite."""
    window: Annotated[int, Field(ge=MIN_WINDOW, le=500, strict=True)] = 50
    """Number of preceding steps to compare with; no step is checked until there are as many."""
    loss_deviations: PositiveFloat = 8.0
    """Number of deviations from which a loss is a spike."""
    grad_norm_deviations: PositiveFloat | None = 20.0
    """Number of deviations from which a gradient norm before clipping is a spike; null: the gradient norm is not
    checked."""


class RecoveryConfig(Section):
    """Responses to failures, and the limits beyond which the job fails."""

    nonfinite: Literal["fail", "skip", "roll_back"] = "fail"
    """Response to a step whose loss or gradient is not finite, before the weights are updated. fail: the job fails and
    reports the samples; skip: the step makes no update; roll_back: the job goes back `roll_back_steps` steps and skips
    the step's samples (docs/numbers.md)."""

    spike: SpikeConfig = SpikeConfig()
    """Response to spikes: finite values far above those of preceding steps."""

    roll_back_steps: Annotated[int, Field(gt=0, le=10_000, strict=True)] = 10
    """Minimum number of committed steps that a rollback undoes; at most twice as many, less one. With a policy of
    roll_back, each rank keeps two copies of its state in host memory, taken at this interval."""

    max_roll_backs: Annotated[int, Field(gt=0, le=100, strict=True)] = 10
    """Maximum number of rollbacks of the job; one more fails it."""

    check_replicas_every: StepsOrNever = 100
    """Steps between comparisons of all parameters that must be bit-identical on several ranks; a rank whose parameters
    differ was corrupted, and is replaced. 0: never."""

    stragglers: Literal["ignore", "report", "replace"] = "report"
    """Response to a rank whose own work, without waiting, persistently takes longer than that of its peers in the same
    stage. report: an event with the evidence; replace: also replaces its process after the next committed step, at most
    once in ten minutes. Own work is measured on CPUs only."""

    max_restarts: Count = 20
    """Maximum number of failures within `restart_window_seconds`; one more fails the job with restarts_exhausted."""
    restart_window_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 86_400.0
    """How long a failure counts toward `max_restarts`, in seconds; 0: forever."""

    @property
    def rolls_back(self) -> bool:
        """Whether any policy is roll_back, so that earlier states must be kept."""
        return "roll_back" in (self.nonfinite, self.spike.policy)

    @property
    def needs_history(self) -> bool:
        """Whether the response to a step depends on preceding steps: on their losses or on earlier roll backs."""
        return self.rolls_back or self.spike.policy != "ignore"
