"""The leases of this control plane: which it holds, whether that is certain, how it takes and releases them, and the
separate thread and connection that renew its own lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from manta.service.leases import decisions
from manta.service.leases.decisions import RENEW_SECONDS, JobSummary, LeaseLost, LeaseUncertain
from manta.service.store import Store, leases
from manta.service.store.database import until_done
from manta.service.store.sqlite import SqliteDatabase
from manta.service.tasks import backoff
from manta.workers.protocol.remote_call import FOR_ALL

if TYPE_CHECKING:
    from manta.service.store.postgresql import PostgresDatabase

log = logging.getLogger(__name__)

# Between two attempts to get a lease that its holder is about to release.
PAUSES = 0.05, 1.0
ANSWER_SECONDS = 3.0
"""A renewal that takes longer is tried again with another connection."""


@dataclass(eq=False)
class HeldLease:
    """The `Fence` of a store for the owner of `name`."""

    name: str
    epoch: int
    _leases: Leases

    def check(self, session: Session) -> None:
        """Raises LeaseLost."""
        leases.check(session, self.name, self._leases.me, self.epoch)

    async def until_certain(self) -> None:
        """Raises LeaseLost."""
        await self._leases.until_certain(self.name)

    async def exceed(self, epoch: int) -> None:
        """Raises LeaseLost."""
        if epoch > self.epoch:
            await self._leases.raise_epoch(self.name, epoch)


class Leases:
    """All leases of this process. If the database is a file this is the only process, and it keeps what it has."""

    def __init__(self, store: Store, me: str, clock: Callable[[], float] = time.monotonic):
        """`me`: the id of this control plane, which is new with each process."""
        self._store, self.me, self._clock = store, me, clock
        self.alone = isinstance(store.database, SqliteDatabase)
        self.changed = asyncio.Event()
        """Set when another control plane may have written something that should be looked at."""
        self._held: dict[str, HeldLease] = {}
        self._renewer: LeaseRenewer | None = None
        self._requested_at = 0.0
        self._removed = self._checked_after_removal = 0
        self._place = self._ray = ""
        self._waiting: list[asyncio.Future[None]] = []
        self._borrowing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks for jobs whose leases callers borrow or wait to borrow; each disappears with the last of them."""
        self._claiming: set[str] = set()

    def join(self, place: str, ray: str) -> None:
        """Count as living from now on, in `place` and on `ray`; then `begin`. Raises RayMismatch."""
        self._place, self._ray, self._requested_at = place, ray, self._clock()
        self._store.write(lambda session: leases.join(session, self.me, place, ray, self.alone))

    def begin(self) -> None:
        """Continue to count as living. Call it on the event loop that all users of this object share."""
        database, loop = self._store.database, asyncio.get_running_loop()
        if isinstance(database, SqliteDatabase):
            return
        self._renewer = LeaseRenewer(
            database,
            self.me,
            lambda requested_at, in_time: _notify(loop, self._record_renewal, requested_at, in_time),
            lambda: _notify(loop, self.changed.set),
        )
        self._renewer.start()

    async def leave(self) -> None:
        """Give everything back, so that others can take it at once."""
        if self._renewer is not None:
            self._renewer.stop()
        self._held.clear()
        await self._store.write_async(lambda session: leases.leave(session, self.me))

    def _record_renewal(self, requested_at: float, in_time: bool) -> None:
        if in_time:
            self._requested_at = requested_at
            self._wake_waiting()
        elif self._removed == self._checked_after_removal:
            log.error("this control plane was declared dead; it checks which jobs it still owns")
            self._removed += 1
            self.changed.set()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    @property
    def certain(self) -> bool:
        """Whether it is certain that no other control plane has taken over what is held."""
        if self.alone:
            return True
        return self._removed == self._checked_after_removal and decisions.may_order(self._requested_at, self._clock())

    async def until_certain(self, name: str) -> None:
        """Return once `name` is certainly held. Raises LeaseLost."""
        while True:
            if name not in self._held:
                raise LeaseLost(name)
            if self.certain:
                return
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def of(self, name: str) -> HeldLease | None:
        """The lease, if it is held."""
        return self._held.get(name)

    def epoch(self, job_id: str, call: str | None = None) -> int | None:
        """The epoch that a call of one of the job's agents carries, given the name of the `call` (`call_name`); None
        stands for anything else that ends or moves what a job has. Without a lease only calls for all are allowed,
        which have no epoch. Raises LeaseLost, LeaseUncertain."""
        lease = self._held.get(job_id)
        if lease is None:
            if call in FOR_ALL:
                return None
            raise LeaseLost(job_id)
        # Reports that an owner has stored may be forgotten, whichever control plane asks for the next ones.
        if call not in FOR_ALL and call != "reports" and not self.certain:
            raise LeaseUncertain(job_id)
        return lease.epoch

    async def claim(self, name: str) -> HeldLease | None:
        """Take `name`; None if another living control plane has it. A lease that is already held stays as it is."""
        if name in self._held:
            return self._held[name]
        self._claiming.add(name)
        try:
            epoch = await self._store.write_async(lambda session: leases.claim(session, name, self.me))
            return None if epoch is None else self.hold(name, epoch)
        finally:
            self._claiming.discard(name)

    def claim_within(self, session: Session, name: str) -> int | None:
        """Take `name` as part of another transaction; call `hold` after its commit. None if it is already held, also by
        this control plane."""
        return None if name in self._held else leases.claim(session, name, self.me)

    def hold(self, name: str, epoch: int) -> HeldLease:
        """`name` was taken with `epoch`."""
        lease = self._held[name] = HeldLease(name, epoch, self)
        return lease

    async def raise_epoch(self, name: str, above: int) -> None:
        """Hold `name` with an epoch higher than `above`, which an agent has seen. Raises LeaseLost."""
        lease = self._held.get(name)
        if lease is None:
            raise LeaseLost(name)
        epoch = lease.epoch
        lease.epoch = await self._store.write_async(
            lambda session: leases.raise_epoch(session, name, self.me, epoch, above)
        )

    async def release(self, name: str) -> None:
        """Give `name` back, however long the database takes."""
        lease = self._held.pop(name, None)
        if lease is not None:
            epoch = lease.epoch
            await until_done(
                lambda: self._store.write_async(lambda session: leases.release(session, name, self.me, epoch))
            )

    @contextlib.asynccontextmanager
    async def borrowed(self, job_id: str, seconds: float = 0.0) -> AsyncIterator[HeldLease | None]:
        """Hold the lease of a job for a moment, to remove what the job has. None if another user, in this process or
        another, still holds it after `seconds`."""
        lock = self._borrowing.setdefault(job_id, asyncio.Lock())
        async with lock:
            lease = await self._claim_unowned(job_id, time.monotonic() + seconds)
            try:
                yield lease
            finally:
                if lease is not None:
                    await self.release(job_id)
                    self.changed.set()

    async def _claim_unowned(self, job_id: str, deadline: float) -> HeldLease | None:
        for pause in backoff(*PAUSES):
            lease = None if job_id in self._held else await self.claim(job_id)
            if lease is not None or time.monotonic() >= deadline:
                return lease
            await asyncio.sleep(pause)
        raise AssertionError("the pauses have no end")

    def is_borrowed(self, job_id: str) -> bool:
        """Whether the lease of the job is held without an owner that supervises the job."""
        lock = self._borrowing.get(job_id)
        return lock is not None and lock.locked()

    def drop(self, lease: HeldLease) -> None:
        """An owner in this process has stopped, which had this lease. If the database still says that it is held, it
        gets an owner again. If another owner has a lease of that name by now, it keeps it."""
        if self._held.get(lease.name) is lease:
            del self._held[lease.name]

    def wake_control_planes(self) -> None:
        """Make other control planes check immediately what was written. Any thread may call it; it does not wait, since
        they check soon anyway."""
        if not self.alone:
            self._store.write_later(leases.wake_control_planes)

    async def hand_over(self, job_id: str, epoch: int, to: str) -> None:
        """Make `to` own the job after its owner in this process, with `epoch`, has stopped. Raises LeaseLost."""
        self._held.pop(job_id, None)
        await self._store.write_async(lambda session: leases.hand_over(session, job_id, self.me, epoch, to))

    async def refresh(
        self, is_busy: Callable[[str], bool] = lambda job: False
    ) -> tuple[list[JobSummary], dict[str, str]]:
        """All jobs that are not final, and by job to which control plane it is to be handed over. Leases that are no
        longer held are dropped; of the jobs that no control plane owns, this control plane's share is taken. `is_busy`:
        whether a job's lease is being taken at the moment, so that it will be held shortly; called on any thread."""
        removals, names = self._removed, set(self._held)
        if removals != self._checked_after_removal:
            await self._store.write_async(
                lambda session: leases.join(session, self.me, self._place, self._ray, alone=False)
            )
        seen = await self._store.read_async(self._look)
        if not self.alone:
            for name in decisions.lost(names & self._held.keys(), seen.owned):
                log.warning("%s is owned by another control plane now", name)
                del self._held[name]
        self._checked_after_removal = removals
        self._wake_waiting()
        known = _OwnLeases(self._held, self._claiming, is_busy)
        if decisions.strays(seen.owned, known, seen.jobs):
            await self._store.write_async(lambda session: self._release_strays(session, known))
        if not seen.has_expired_members and not decisions.to_claim(seen.jobs, known, self.me, len(seen.living)):
            return seen.jobs, decisions.to_hand_over(seen.jobs, self.me, seen.well)
        jobs, taken = await self._store.write_async(lambda session: self._take(session, known))
        for job, epoch in taken.items():
            self.hold(job, epoch)
        return jobs, {}

    def _release_strays(self, session: Session, known: _OwnLeases) -> None:
        strays = decisions.strays(leases.owned(session, self.me), known, leases.overview(session))
        leases.release_all(session, strays, self.me)

    def _look(self, session: Session) -> _LeaseView:
        died = not self.alone and leases.has_expired_members(session, self.me)
        owned = leases.owned(session, self.me)
        return _LeaseView(leases.overview(session), owned, leases.living(session), leases.well(session), died)

    def _take(self, session: Session, known: _OwnLeases) -> tuple[list[JobSummary], dict[str, int]]:
        if not self.alone:
            leases.remove_dead(session)
        jobs = leases.overview(session)
        wanted = decisions.to_claim(jobs, known, self.me, len(leases.living(session)))
        claims = {job: leases.claim(session, job, self.me) for job in wanted}
        return jobs, {job: epoch for job, epoch in claims.items() if epoch is not None}


class _OwnLeases:
    """The names that are held or are being taken, evaluated at the time of each query."""

    def __init__(self, held: Mapping[str, HeldLease], claiming: Container[str], is_busy: Callable[[str], bool]):
        self._held, self._claiming, self._is_busy = held, claiming, is_busy

    def __contains__(self, name: object) -> bool:
        return name in self._held or name in self._claiming or self._is_busy(str(name))


@dataclass(frozen=True)
class _LeaseView:
    jobs: list[JobSummary]
    owned: set[str]
    living: list[str]
    well: list[str]
    has_expired_members: bool


def _notify(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *about: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile
        loop.call_soon_threadsafe(what, *about)


def new_id() -> str:
    """An id for a control plane."""
    return secrets.token_hex(8)


class LeaseRenewer:
    """Renews the lease of this control plane until `stop`, on a thread and connection that nothing else delays. If the
    database is unreachable it keeps trying: only the database can say that it is too late."""

    def __init__(
        self,
        database: PostgresDatabase,
        me: str,
        renewed: Callable[[float, bool], None],
        woken: Callable[[], None],
    ):
        """`renewed` is called after each renewal with the time at which it was requested, by the monotonic clock, and
        whether it was in time; `woken` is called whenever another control plane has written something to look at. Both
        on this thread."""
        self._database, self._me, self._renewed, self._woken = database, me, renewed, woken
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease keeper", daemon=True)

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing. Does not wait for an outstanding answer."""
        self._stopped.set()

    def _run(self) -> None:
        away = False
        while not self._stopped.is_set():
            try:
                with self._database.keeping(ANSWER_SECONDS) as connection:
                    connection.execute(text(f"LISTEN {leases.CHANNEL}"))
                    if away:
                        log.warning("the database answers again")
                    away = False
                    self._keep(connection)
            except SQLAlchemyError as error:
                if not away:
                    log.warning("the database does not answer, so the lease is not renewed (%s)", error)
                away = True
                self._stopped.wait(RENEW_SECONDS)

    def _keep(self, connection: Connection) -> None:
        due = 0.0
        while not self._stopped.is_set():
            if (requested_at := time.monotonic()) >= due:
                with Session(bind=connection) as session:
                    in_time = leases.renew(session, self._me)
                if self._stopped.is_set():
                    return
                self._renewed(requested_at, in_time)
                due = requested_at + RENEW_SECONDS
            if self._database.wait_for_notification(connection, max(0.0, due - time.monotonic())):
                self._woken()
