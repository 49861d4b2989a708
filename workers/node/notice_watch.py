"""Asks a cloud's metadata service again and again whether it is about to take this machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from workers.node.cloud_notices import MetadataSource, MetadataUnavailable, Notice

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""As often as AWS asks for it; the shortest notice is 30 s."""


class NoticeWatch:
    """Asks on a thread of its own until `stop`."""

    def __init__(
        self, source: MetadataSource, noticed: Callable[[float, str], None], look_seconds: float = LOOK_SECONDS
    ):
        """`noticed` is called once for each notice, with for how long the machine can still be counted on, and why; on
        the watch's thread."""
        self._source, self._noticed, self._look_seconds = source, noticed, look_seconds
        self._stopped = threading.Event()
        self._known: set[str] = set()
        self._answers = True
        self._thread = threading.Thread(target=self._run, name="cloud notices", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(self._look_seconds)

    def look(self) -> None:
        """Ask once. What is not answered is asked again, and no notice."""
        try:
            notice = self._source.notice(datetime.now(UTC))
        except MetadataUnavailable as error:
            if self._answers:
                log.warning("%s; it is asked again and again", error)
            self._answers = False
            return
        if not self._answers:
            log.warning("the metadata service answers again")
        self._answers = True
        if notice is not None and notice.id not in self._known:
            self._pass_on(notice)

    def _pass_on(self, notice: Notice) -> None:
        self._known.add(notice.id)
        log.warning("%s: this machine can be counted on for %.0f s", notice.reason, notice.seconds)
        self._noticed(notice.seconds, notice.reason)
