"""All queries about control planes and what each of them owns (decision 0012)."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, cast

from sqlalchemy import CursorResult, bindparam, delete, select, text, update
from sqlalchemy.orm import Session

from manta.service.leases.decisions import LEASE_SECONDS, JobSummary, LeaseLost, RayMismatch, is_claimable, is_over
from manta.service.states import UNFINISHED, JobState
from manta.service.store.installation_tables import ControlPlaneRow, Lease
from manta.service.store.locks import MEMBERS_LOCK
from manta.service.store.tables import Job

CHANNEL = "manta"
"""Channel of the notifications with which control planes wake each other."""


def now(session: Session) -> float:
    """The database's clock, in Unix seconds."""
    if session.get_bind().dialect.name == "sqlite":  # which only has this machine's
        return time.time()
    return float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def join(session: Session, me: str, place: str, ray: str, alone: bool) -> None:
    """From now on `me` counts as alive, and earlier ones at its `place` as dead, or with `alone` all others. Raises
    RayMismatch if a living one does not use this `ray`."""
    others = select(ControlPlaneRow.id).where(ControlPlaneRow.id != me)
    _remove(session, list(session.scalars(others if alone else others.where(ControlPlaneRow.place == place))))
    remove_dead(session)
    other = session.scalars(select(ControlPlaneRow).where(ControlPlaneRow.ray != ray, ControlPlaneRow.id != me)).first()
    if other is not None:
        raise RayMismatch(other.place, other.ray, ray)
    session.merge(ControlPlaneRow(id=me, place=place, ray=ray, lease_until=now(session) + LEASE_SECONDS))


def renew(session: Session, me: str) -> bool:
    """Extend the life of `me`; False if it was declared dead."""
    until = now(session) + LEASE_SECONDS
    return _count(session, update(ControlPlaneRow).where(ControlPlaneRow.id == me).values(lease_until=until)) == 1


def has_expired_members(session: Session, me: str) -> bool:
    """Whether the time of a control plane other than `me` is over."""
    return bool(set(_dead(session)) - {me})


def remove_dead(session: Session) -> None:
    """Remove control planes whose time is over, and abort what they are doing in the database."""
    _remove(session, _dead(session), only_if_dead=True)


def leave(session: Session, me: str) -> None:
    """`me` no longer owns anything; notifies the others."""
    session.execute(delete(ControlPlaneRow).where(ControlPlaneRow.id == me))
    session.execute(update(Lease).where(Lease.owner == me).values(owner=None))
    wake_control_planes(session)


def living(session: Session) -> list[str]:
    """The ids of all control planes that were not declared dead."""
    return list(session.scalars(select(ControlPlaneRow.id)))


def well(session: Session) -> list[str]:
    """The ids of those that have recently renewed."""
    rows = session.execute(select(ControlPlaneRow.id, ControlPlaneRow.lease_until)).all()
    at = now(session)
    return [each for each, until in rows if is_claimable(until, at)]


def hand_over(session: Session, name: str, me: str, epoch: int, to: str) -> None:
    """Make `to` the owner of `name`; it will find that out. Raises LeaseLost."""
    check(session, name, me, epoch)
    session.execute(update(Lease).where(Lease.name == name).values(owner=to))
    wake_control_planes(session)


def claim(session: Session, name: str, me: str) -> int | None:
    """Make `me` the owner of `name`; returns the epoch, or None if another living one owns it."""
    _lock(session, shared=True)
    session.execute(text("INSERT INTO leases (name, epoch) VALUES (:name, 0) ON CONFLICT DO NOTHING"), {"name": name})
    lease = session.scalars(
        select(Lease).where(Lease.name == name).with_for_update().execution_options(populate_existing=True)
    ).one()
    if lease.owner not in (None, me) and session.get(ControlPlaneRow, lease.owner) is not None:
        return None
    lease.owner, lease.epoch = me, lease.epoch + 1
    session.flush()
    return lease.epoch


def check(session: Session, name: str, me: str, epoch: int) -> None:
    """Make sure that `me` owns `name` with this `epoch`, until the transaction ends. Raises LeaseLost."""
    current = select(Lease.epoch).where(Lease.name == name, Lease.owner == me).with_for_update(read=True)
    if session.scalar(current) != epoch:
        raise LeaseLost(name)


def raise_epoch(session: Session, name: str, me: str, epoch: int, above: int) -> int:
    """Continue to own `name`, with an epoch above `above`, which an agent knows from a time that this database has
    forgotten; returns the new one. Raises LeaseLost."""
    check(session, name, me, epoch)
    higher = max(epoch, above) + 1
    session.execute(update(Lease).where(Lease.name == name).values(epoch=higher))
    return higher


def release(session: Session, name: str, me: str, epoch: int) -> None:
    """Stop owning `name`, unless another one already owns it."""
    held = (Lease.name == name, Lease.owner == me, Lease.epoch == epoch)
    session.execute(update(Lease).where(*held).values(owner=None))
    wake_control_planes(session)


def wake_control_planes(session: Session) -> None:
    """Make all control planes check immediately."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_notify(:channel, '')"), {"channel": CHANNEL})


def overview(session: Session) -> list[JobSummary]:
    """All unfinished jobs, in the order of their turn."""
    query = (
        select(Job.id, Job.state, Job.wanted_replicas, Job.priority, ControlPlaneRow.id, Lease.epoch)
        .outerjoin(Lease, Lease.name == Job.id)
        .outerjoin(ControlPlaneRow, ControlPlaneRow.id == Lease.owner)
        .where(Job.state.in_(UNFINISHED))
        .order_by(Job.priority.desc(), Job.id)
    )
    return [
        JobSummary(job, JobState(state), replicas, priority, owner, epoch or 0)
        for job, state, replicas, priority, owner, epoch in session.execute(query)
    ]


def owned(session: Session, me: str) -> set[str]:
    """The names of all leases of `me`."""
    return set(session.scalars(select(Lease.name).where(Lease.owner == me)))


def release_all(session: Session, names: Collection[str], me: str) -> None:
    """Stop owning these, unless others already do."""
    session.execute(update(Lease).where(Lease.name.in_(names), Lease.owner == me).values(owner=None))
    wake_control_planes(session)


def forget(session: Session, name: str) -> None:
    """There is nothing to own any more."""
    session.execute(delete(Lease).where(Lease.name == name))


def clear_owners(session: Session) -> None:
    """After a restore no control plane owns anything; epochs stay."""
    session.execute(delete(ControlPlaneRow))
    session.execute(update(Lease).values(owner=None))


def connection_name(me: str) -> str:
    """Name of the connections of `me`, as shown by the server."""
    return f"manta-{me}"


def _dead(session: Session) -> list[str]:
    rows = session.execute(select(ControlPlaneRow.id, ControlPlaneRow.lease_until)).all()
    at = now(session)
    return [each for each, until in rows if is_over(until, at)]


def _remove(session: Session, ids: list[str], only_if_dead: bool = False) -> None:
    if ids:
        _end_connections(session, ids)
    _lock(session, shared=False)
    if only_if_dead:  # it was late, but has renewed meanwhile
        ids = [each for each in _dead(session) if each in ids]
    session.execute(delete(ControlPlaneRow).where(ControlPlaneRow.id.in_(ids)))


def _end_connections(session: Session, ids: list[str]) -> None:
    """One that was stopped within a transaction still holds its locks."""
    if session.get_bind().dialect.name == "postgresql":
        ending = text(
            "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE application_name IN :names "
            "AND datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
        ).bindparams(bindparam("names", expanding=True))
        session.execute(ending, {"names": [connection_name(each) for each in ids]})


def _lock(session: Session, shared: bool) -> None:
    """Until the end of the transaction no control plane joins or is removed; with `shared`, others may hold this lock
    too."""
    if session.get_bind().dialect.name == "postgresql":
        kind = "_shared" if shared else ""
        session.execute(text(f"SELECT pg_advisory_xact_lock{kind}({MEMBERS_LOCK})"))


def _count(session: Session, statement: Any) -> int:
    return cast("CursorResult[Any]", session.execute(statement)).rowcount
