"""Renews the lease of this control plane, on a separate thread and connection that nothing else delays."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.leases.decisions import RENEW_SECONDS
from service.store import leases
from service.store.postgresql import PostgresDatabase

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""A renewal that takes longer is tried again with another connection."""


class Keeper:
    """Renews until `stop`. If the database is unreachable it keeps trying: only the database can say that it is too
    late."""

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
            if (asked_at := time.monotonic()) >= due:
                with Session(bind=connection) as session:
                    in_time = leases.renew(session, self._me)
                if self._stopped.is_set():
                    return
                self._renewed(asked_at, in_time)
                due = asked_at + RENEW_SECONDS
            if self._database.wait_for_notification(connection, max(0.0, due - time.monotonic())):
                self._woken()
