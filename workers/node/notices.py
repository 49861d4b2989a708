"""Notices that a machine is to be taken away: who gives them, a watch that asks for them regularly, and SIGTERM, which
such machines send."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from manta.workers.errors import MantaError

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""The interval that AWS recommends; the shortest notice is 30 s."""

NOTICE_SECONDS = 25.0
"""How long a machine is assumed to live after SIGTERM: clouds give 30 s and more, Kubernetes 30 s by default."""
CHUNK_BYTES = 65536


class SourceUnavailable(MantaError):
    """A source of notices does not answer, or gives an unexpected answer: it is unknown whether the machine is to be
    taken away."""


@dataclass(frozen=True)
class Notice:
    """The machine is going to be taken away."""

    id: str
    """Stays the same as long as the notice is about the same event."""
    seconds: float | None
    """How long the machine can still be relied on, counted from the request; None if that is not said."""
    reason: str
    """The reason, in words."""


class NoticeSource(Protocol):
    """A service that knows whether the machine is to be taken away."""

    @property
    def name(self) -> str:
        """Name of the service in `MANTA_NODE_NOTICES`."""
        ...

    def notice(self, now: datetime) -> Notice | None:
        """The notice at `now`, by this machine's clock; None if the machine stays. Raises SourceUnavailable."""
        ...


def most_urgent(notices: list[Notice]) -> Notice | None:
    """The notice that leaves the least time, where one without a time leaves the most; None if there are no notices."""
    return min(notices, key=lambda notice: (notice.seconds is None, notice.seconds or 0.0), default=None)


class NoticeWatch:
    """Asks a source regularly, on a separate thread, until `stop`."""

    def __init__(
        self,
        source: NoticeSource,
        noticed: Callable[[Notice], None],
        withdrawn: Callable[[], None],
        poll_seconds: float = POLL_SECONDS,
    ):
        """`noticed` is called once with each notice, `withdrawn` when none is left; both on the watch's thread."""
        self._source, self._noticed, self._withdrawn = source, noticed, withdrawn
        self._poll_seconds = poll_seconds
        self._stopped = threading.Event()
        self._known: Notice | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=f"notices of {source.name}", daemon=True)

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop asking."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.poll()
            self._stopped.wait(self._poll_seconds)

    def poll(self) -> None:
        """Ask once. An unanswered question is asked again, and changes nothing."""
        try:
            notice = self._source.notice(datetime.now(UTC))
        except SourceUnavailable as error:
            if not self._problem:
                log.warning("%s; retrying", error)
            self._problem = str(error)
            return
        if self._problem:
            log.warning("%s answers again", self._source.name)
        self._problem = ""
        known, self._known = self._known, notice
        if notice is not None and (known is None or notice.id != known.id):
            self._pass_on(notice)
        elif notice is None and known is not None:
            log.warning("this machine stays: the notice was withdrawn (%s)", known.reason)
            self._withdrawn()

    def _pass_on(self, notice: Notice) -> None:
        soon = "is being drained" if notice.seconds is None else f"can be counted on for {notice.seconds:.0f} s"
        log.warning("%s: this machine %s", notice.reason, soon)
        self._noticed(notice)


def on_termination(act: Callable[[], None]) -> None:
    """From now on SIGTERM does not end this process, but calls `act` on a thread.

    The handler is faulthandler's, in C: Python's own runs only on the main thread, which in Ray's workers does not
    return to Python.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    faulthandler.register(signal.SIGTERM, file=write, all_threads=False, chain=False)

    def listen() -> None:
        while os.read(read, CHUNK_BYTES):
            act()

    threading.Thread(target=listen, name="termination", daemon=True).start()
