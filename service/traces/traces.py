"""Sends the starts and recoveries of jobs, read from the database, to a collector. No job waits for it, or fails
because of it."""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from manta.service.cluster.sizes import layout_in_use
from manta.service.store import Store, generations, jobs, recoveries
from manta.service.store.errors import JobNotFound
from manta.service.store.tables import Job
from manta.service.stored_specs import SpecNotUnderstood, stored_spec
from manta.service.traces.spans import JobHistory, spans_of
from manta.workers.config import ParallelConfig
from manta.workers.errors import MantaError

if TYPE_CHECKING:
    from manta.service.traces.exporter import SpanSender

log = logging.getLogger(__name__)

MAX_TO_READ = 1024
"""Number of starts and recoveries that may wait to be read from the database; further ones are dropped."""
FLUSH_SECONDS = 2.0
"""The longest that the end of the service waits for the collector."""
LOG_INTERVAL_SECONDS = 300.0
"""Losses are logged at most once in this time."""


class TracesNotInstalled(MantaError):
    """The packages that send traces are missing."""


def refuse_without_packages(endpoint: str | None) -> None:
    """Raise TracesNotInstalled if traces are to be sent and the packages for that are not installed."""
    if endpoint is None:
        return
    try:
        importlib.import_module("manta.service.traces.exporter")
    except ImportError as error:
        raise TracesNotInstalled(
            f"MANTA_TRACES needs OpenTelemetry, and that is not installed here ({error}): "
            "pip install 'manta-train[traces]'"
        ) from error


class Traces:
    """Sends the traces of one control plane's jobs."""

    def __init__(self, store: Store, endpoint: str):
        """`endpoint`: of the collector, see `Settings.traces`. Starts at once."""
        self._store, self._endpoint = store, endpoint
        self._to_read: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._sender: SpanSender | None = None
        self._lock = threading.Lock()
        self._logged_at = -LOG_INTERVAL_SECONDS
        self.lost = 0
        """Number of starts and recoveries that did not reach the collector."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def first_step(self, job_id: str, generation: int) -> None:
        """The first step of a generation is in the database. Returns at once; may be called again."""
        if self._to_read.qsize() < MAX_TO_READ:
            self._to_read.put((job_id, generation))
        else:
            self._count_lost(1)

    def close(self) -> None:
        """Send what waits, within at most FLUSH_SECONDS."""
        self._to_read.put(None)
        self._thread.join(FLUSH_SECONDS)
        if self._thread.is_alive() and self._sender is not None:
            self._sender.interrupt()

    def _run(self) -> None:
        from manta.service.traces.exporter import SpanSender

        self._sender = SpanSender(self._endpoint, self._count_lost)
        while (request := self._to_read.get()) is not None:
            self._read_and_send(self._sender, *request)
        self._sender.close()

    def _read_and_send(self, sender: SpanSender, job_id: str, generation: int) -> None:
        try:
            with self._store.read() as session:
                spans = spans_of(_history_of(session, job_id), generation)
            sender.send(spans)
        except JobNotFound:  # deleted in the meantime, and its history with it
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the next ones may succeed
            log.warning("no spans of generation %d of %s: %r", generation, job_id, error)
            self._count_lost(1)

    def _count_lost(self, count: int) -> None:
        with self._lock:
            self.lost += count
            now = time.monotonic()
            if not count or now - self._logged_at < LOG_INTERVAL_SECONDS:
                return
            self._logged_at = now
            log.warning("traces: %d starts and recoveries so far did not reach %s", self.lost, self._endpoint)


def _history_of(session: Session, job_id: str) -> JobHistory:
    """The history of a job so far."""
    job = jobs.get(session, job_id)
    return JobHistory(
        job,
        jobs.states_over_time(session, job_id),
        generations.of_job(session, job_id),
        recoveries.of_job(session, job_id),
        _layout(job),
    )


def _layout(job: Job) -> ParallelConfig | None:
    try:
        return layout_in_use(stored_spec(job).spec.layout, job)
    except SpecNotUnderstood:
        return None
