"""Regularly asks a source of notices whether this machine is about to be taken away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from workers.node.notices import Notice, NoticeSource, SourceUnavailable

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""The interval that AWS recommends; the shortest notice is 30 s."""


class NoticeWatch:
    """Asks on a separate thread until `stop`."""

    def __init__(
        self,
        source: NoticeSource,
        noticed: Callable[[Notice], None],
        withdrawn: Callable[[], None],
        look_seconds: float = LOOK_SECONDS,
    ):
        """`noticed` is called once with each notice, `withdrawn` when none is left; both on the watch's thread."""
        self._source, self._noticed, self._withdrawn = source, noticed, withdrawn
        self._look_seconds = look_seconds
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
            self.look()
            self._stopped.wait(self._look_seconds)

    def look(self) -> None:
        """Ask once. An unanswered question is asked again, and changes nothing."""
        try:
            notice = self._source.notice(datetime.now(UTC))
        except SourceUnavailable as error:
            if not self._problem:
                log.warning("%s; it is asked again", error)
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
