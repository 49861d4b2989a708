"""Numbers of this control plane itself and of the requests that it answers; of the nodes as it sees them, and of their
GPUs, where they have any and NVML."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manta.api.metrics import Family, Samples, counter, gauge, if_known
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.cluster_view import NODE_STATES, Measurements, NodeMeasurements
from manta.service.control.control_plane import ControlPlane
from manta.service.store import Store
from manta.workers.protocol.messages import PROTOCOL, GpuReading

REQUEST_SECONDS = "manta_http_request_duration_seconds"
_BUILD = gauge("manta_build_info", "1, with the release that runs", "version", "protocol", "python")
_ANSWERS = gauge("manta_control_thread_up", "1 where the control plane's own thread answers, else 0")
_DELAY = gauge("manta_control_thread_delay_seconds", "How long the control plane's thread took to turn to this scrape")
_OWNED = gauge("manta_owned_jobs", "Jobs that this control plane owns")
_LAG = gauge("manta_reconcile_lag_seconds", "How long the oldest of what a loop has still to do has been due", "loop")
_RAY = gauge("manta_ray_up", "1 where Ray tells its nodes, else 0")
_NODES = gauge("manta_nodes", "Nodes that can hold ranks, by state", "state")
_UNITS = gauge("manta_units", "GPUs or slots of living nodes, each of which holds a rank", "unit")
_FREE = gauge("manta_units_free", "Those that nothing holds", "unit")
_IN_USE = gauge("manta_database_connections", "Connections to the database that are in use", "purpose")
_MOST = gauge("manta_database_connections_max", "So many there can be", "purpose")
_WAITING = gauge("manta_database_writes_waiting", "Writes that wait or are being done")
_OLDEST = gauge("manta_database_oldest_write_seconds", "How long the oldest of these has waited; 0 where there is none")
_WRITES = counter("manta_database_writes_total", "Writes that have ended, well or not")
_SECONDS = counter("manta_database_write_seconds_total", "Time of these writes, waiting included")
_GPU = ("node", "host", "gpu")
Read = Callable[[GpuReading], Samples]


class ControlPlaneCollector(Collector):
    """Asks the control plane with every scrape; what it does not answer is left out."""

    def __init__(self, control: ControlPlane):
        self._control = control

    def collect(self) -> Iterable[Metric]:
        """All numbers as of now."""
        version = importlib.metadata.version("manta-train")
        yield _BUILD.of([((version, str(PROTOCOL), platform.python_version()), 1)])
        yield from _of_database(self._control.store)
        try:
            measurements = self._control.measurements()
        except ClusterUnavailable:
            yield _ANSWERS.of([((), 0)])
            return
        yield _ANSWERS.of([((), 1)])
        yield from _of_loops(measurements)
        if measurements.ray_answers:
            yield from _of_nodes(measurements)
            yield from gpu_metrics(measurements.nodes)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are unique by construction, and registering must not query anything."""
        return []


def _of_database(store: Store) -> Sequence[Metric]:
    pools, (done, seconds) = store.connections(), store.writes.done
    return [
        _IN_USE.of(((purpose,), pool.in_use) for purpose, pool in pools.items()),
        _MOST.of(((purpose,), pool.most) for purpose, pool in pools.items()),
        _WAITING.of([((), store.writes.length)]),
        _OLDEST.of([((), store.writes.oldest_seconds)]),
        _WRITES.of([((), done)]),
        _SECONDS.of([((), seconds)]),
    ]


def _of_loops(measurements: Measurements) -> Sequence[Metric]:
    return [
        _DELAY.of([((), measurements.loop_delay_seconds)]),
        _OWNED.of([((), measurements.owned_jobs)]),
        _LAG.of(((loop,), seconds) for loop, seconds in measurements.lag_seconds.items()),
        _RAY.of([((), measurements.ray_answers)]),
    ]


def _of_nodes(measurements: Measurements) -> Sequence[Metric]:
    states = [node.state for node in measurements.nodes]
    return [
        _NODES.of(((state,), states.count(state)) for state in NODE_STATES),
        _UNITS.of(((unit,), total) for unit, (total, _) in measurements.units.items()),
        _FREE.of(((unit,), free) for unit, (_, free) in measurements.units.items()),
    ]


def _memory_errors(gpu: GpuReading) -> Samples:
    errors = {"corrected": gpu.ecc_corrected, "uncorrected": gpu.ecc_uncorrected}
    return [((kind,), count) for kind, count in errors.items() if count is not None]


_OF_GPU: tuple[tuple[Family, Read], ...] = (
    (gauge("manta_gpu_up", "1 where the driver reaches the GPU, else 0", *_GPU), lambda gpu: [((), gpu.answers)]),
    (
        gauge("manta_gpu_utilization_ratio", "Part of the time in which a kernel ran, 0 to 1", *_GPU),
        if_known(lambda gpu: gpu.busy_ratio),
    ),
    (gauge("manta_gpu_memory_used_bytes", "Memory in use", *_GPU), if_known(lambda gpu: gpu.memory_used_bytes)),
    (gauge("manta_gpu_memory_bytes", "Memory of the GPU", *_GPU), if_known(lambda gpu: gpu.memory_total_bytes)),
    (
        gauge("manta_gpu_temperature_celsius", "Temperature of the GPU", *_GPU),
        if_known(lambda gpu: gpu.temperature_celsius),
    ),
    (gauge("manta_gpu_power_watts", "Power that the GPU draws", *_GPU), if_known(lambda gpu: gpu.power_watts)),
    (
        counter("manta_gpu_ecc_errors_total", "Memory errors since the driver was loaded", *_GPU, "kind"),
        _memory_errors,
    ),
    (
        counter("manta_gpu_xid_errors_total", "Errors that the driver has reported, by code", *_GPU, "xid"),
        lambda gpu: [((xid,), count) for xid, count in gpu.xids.items()],
    ),
)
FAMILIES: tuple[Family, ...] = (
    *(_BUILD, _ANSWERS, _DELAY, _OWNED, _LAG, _RAY, _NODES, _UNITS, _FREE),
    *(_IN_USE, _MOST, _WAITING, _OLDEST, _WRITES, _SECONDS),
    *(family for family, _ in _OF_GPU),
)


def gpu_metrics(nodes: Sequence[NodeMeasurements]) -> Iterable[Metric]:
    """All families, empty ones included."""
    return [family.of(_by_gpu(nodes, read)) for family, read in _OF_GPU]


def _by_gpu(nodes: Sequence[NodeMeasurements], read: Read) -> Iterator[tuple[Sequence[str], float]]:
    for node in nodes:
        for gpu in node.gpus:
            for labels, value in read(gpu):
                yield (node.id, node.host, str(gpu.index), *labels), value


class RequestTimer:
    """ASGI middleware that measures how long requests take, by method, route and status."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        """Wraps `app` and registers its histogram at `registry`."""
        self._app = app
        self._histogram = Histogram(
            REQUEST_SECONDS,
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
