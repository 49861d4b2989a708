"""The service's numbers for Prometheus: read from the database at scrape time, so that they cannot go stale."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.ledger import Ledger
from service.store import Job, Store, jobs, ledgers

_GAUGES = {
    "manta_job_loss": ("loss", "Training loss of the last committed step, nats per token"),
    "manta_job_tokens_per_second": ("tokens_per_second", "Throughput of the last committed step"),
    "manta_job_mfu_full_ratio": ("mfu_full", "Model FLOP utilisation, attention in full, 0 to 1"),
}


class JobCollector(Collector):
    """Numbers of jobs by state, and of each unfinished job by its id."""

    def __init__(self, store: Store, bound: str | None):
        """Reads from `store`; with `bound` only the jobs of that project."""
        self._store, self._bound = store, bound

    def collect(self) -> Iterable[Metric]:
        """All numbers as of now."""
        with self._store.read() as session:
            counts = jobs.count_by_state(session, self._bound)
            unfinished = jobs.unfinished(session, self._bound)
            books = {job.id: ledgers.of_job(session, job.id, time.time()) for job in unfinished}
        by_state = GaugeMetricFamily("manta_jobs", "Jobs by state", labels=["state"])
        for state, count in counts.items():
            by_state.add_metric([state.value], count)
        yield by_state
        yield from _job_metrics(unfinished, books)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are unique by construction, and registering must not read the database."""
        return []


def _job_metrics(unfinished: list[Job], books: dict[str, Ledger]) -> Iterable[Metric]:
    step = GaugeMetricFamily("manta_job_step", "Last committed step", labels=["job"])
    goodput = GaugeMetricFamily("manta_job_goodput_ratio", "Compute / (wall - queue - pause), 0 to 1", labels=["job"])
    # A gauge: what a step was is only known once it is committed, so time may still move to another class.
    spent = GaugeMetricFamily("manta_job_ledger_seconds", "Time since submission by class", labels=["job", "class"])
    restarts = CounterMetricFamily("manta_job_restarts", "Automatic restarts", labels=["job"])
    gauges = {name: GaugeMetricFamily(name, text, labels=["job"]) for name, (_, text) in _GAUGES.items()}
    for job in unfinished:
        step.add_metric([job.id], job.step)
        restarts.add_metric([job.id], job.restarts)
        book = books[job.id]
        if book.goodput is not None:
            goodput.add_metric([job.id], book.goodput)
        for kind, seconds in book.seconds.items():
            spent.add_metric([job.id, kind], seconds)
        for name, (key, _) in _GAUGES.items():
            value = job.metrics.get(key)
            if value is not None:
                gauges[name].add_metric([job.id], value)
    return [step, goodput, spent, restarts, *gauges.values()]


class RequestTimer:
    """ASGI middleware that measures how long requests take, by method, route and status."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        """Wraps `app` and registers its histogram at `registry`."""
        self._app = app
        self._histogram = Histogram(
            "manta_http_request_duration_seconds",
            "Time to answer a request",
            ("method", "route", "status"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; only HTTP is measured."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), "500"

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            labels = (_bounded_method(scope["method"]), _route_of(scope), status)
            self._histogram.labels(*labels).observe(time.perf_counter() - started)


def _route_of(scope: Scope) -> str:
    """The route's template, never the path itself: labels stay bounded."""
    return getattr(scope.get("route"), "path", "unmatched")


def _bounded_method(method: str) -> str:
    return method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS") else "other"
