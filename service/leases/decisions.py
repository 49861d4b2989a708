"""Decisions about leases, given who holds which: pure functions over data; and the errors of a control plane that does
not, or not certainly, hold one."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from manta.service.states import SUPERVISED, JobState
from manta.workers.errors import MantaError

LEASE_SECONDS = 6.0
"""How long a control plane counts as living after its last renewal."""
RENEW_SECONDS = 1.0
MARGIN_SECONDS = 1.0
"""How much earlier an owner stops giving orders than others may take over: the time that an order already sent may
take."""
MIN_SURPLUS = 3
"""A control plane has too many jobs if it has this many more than another."""
HOUSEKEEPING = "housekeeping"
"""Name of the lease for what concerns all jobs: the queue, retention, what finished jobs left behind."""


class LeaseLost(MantaError):
    """Another control plane, or none, owns it now; do not touch it."""

    def __init__(self, name: str):
        """`name`: the lease's name."""
        super().__init__(f"{name} is no longer owned by this control plane")


class LeaseUncertain(MantaError):
    """The time until which this control plane owns it may be over: send no order until that is known."""

    def __init__(self, name: str):
        """`name`: the lease's name."""
        super().__init__(f"it is not certain that this control plane still owns {name}: the database does not answer")


class RayMismatch(MantaError):
    """Control planes of one database must use one Ray."""

    def __init__(self, place: str, theirs: str, ours: str):
        """`place`: where the other one runs; `theirs`, `ours`: the Ray that each of them uses."""
        super().__init__(
            f"a control plane on this database runs already at {place}, and uses another Ray ({theirs}, here {ours}): "
            "end it, or start this one with --ray and the address of that Ray (docs/operations.md, Several control "
            "planes)"
        )


@dataclass(frozen=True)
class JobSummary:
    """A job that is not final, and which control plane owns it."""

    id: str
    state: JobState
    wanted_replicas: int | None
    priority: int
    owner: str | None
    """A living control plane; None: none."""
    epoch: int
    """0: never held."""


def is_over(lease_until: float, now: float) -> bool:
    """Whether a control plane that counts as living until `lease_until` is considered dead; both times by the
    database's clock."""
    return lease_until <= now


def is_claimable(lease_until: float, now: float) -> bool:
    """Whether a control plane has renewed its lease recently enough that a job may be handed over to it; both times by
    the database's clock."""
    return lease_until - now > LEASE_SECONDS - 2 * RENEW_SECONDS


def may_order(requested_at: float, now: float) -> bool:
    """Whether a control plane whose last successful renewal was requested at `requested_at` can be sure that no other
    one has taken over from it; both times by a local clock that continues while the process is suspended."""
    return now - requested_at < LEASE_SECONDS - MARGIN_SECONDS


def lost(held: Collection[str], owned: Collection[str]) -> set[str]:
    """What a control plane believes to hold although, according to the database (`owned`), it no longer does."""
    return set(held) - set(owned)


def strays(owned: Collection[str], held: Container[str], jobs: Sequence[JobSummary]) -> set[str]:
    """What is to be given back: according to the database a control plane owns it, but it does not know that, since it
    broke off while giving it back, and no control plane has to own it."""
    supervised = {job.id for job in jobs if job.state in SUPERVISED}
    return {name for name in owned if name not in held and name not in supervised}


def to_claim(jobs: Sequence[JobSummary], held: Container[str], me: str, living: int) -> list[str]:
    """The jobs that `me`, one of `living` control planes, takes now: its share of those that no control plane owns, so
    that all living ones get some of a dead one's, and those that it owns according to the database without knowing
    it."""
    unowned = [job.id for job in jobs if job.state in SUPERVISED and job.owner is None and job.id not in held]
    share = -(-len(unowned) // max(1, living))
    own = [job.id for job in jobs if job.state in SUPERVISED and job.owner == me and job.id not in held]
    return own + unowned[:share]


def to_hand_over(jobs: Sequence[JobSummary], me: str, living: Collection[str]) -> dict[str, str]:
    """By job, to which of these control planes, `me` among them, `me` gives it: if it has clearly more than another, to
    that one, until both have the same number. Only jobs that train and have nothing else going on."""
    counts = {plane: sum(job.owner == plane for job in jobs) for plane in living}
    least = min(sorted(counts), key=counts.__getitem__, default=me)
    surplus = counts.get(me, 0) - counts.get(least, 0)
    if surplus < MIN_SURPLUS:
        return {}
    mine = [job.id for job in jobs if job.owner == me and job.state == JobState.RUNNING]
    return dict.fromkeys(mine[: surplus // 2], least)
