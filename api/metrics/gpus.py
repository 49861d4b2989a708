"""Metrics of the GPUs, where nodes have any and NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric

from api.metrics.families import Family, Samples, counter, gauge
from service.monitoring.measurements import NodeMeasurements
from workers.protocol.messages import GpuReading

_GPU = ("node", "host", "gpu")
Read = Callable[[GpuReading], Samples]


def _where_known(value: Callable[[GpuReading], float | None]) -> Read:
    def samples(gpu: GpuReading) -> Samples:
        known = value(gpu)
        return [] if known is None else [((), known)]

    return samples


def _memory_errors(gpu: GpuReading) -> Samples:
    errors = {"corrected": gpu.ecc_corrected, "uncorrected": gpu.ecc_uncorrected}
    return [((kind,), count) for kind, count in errors.items() if count is not None]


_OF_GPU: tuple[tuple[Family, Read], ...] = (
    (gauge("manta_gpu_up", "1 where the driver reaches the GPU, else 0", *_GPU), lambda gpu: [((), gpu.answers)]),
    (
        gauge("manta_gpu_utilization_ratio", "Part of the time in which a kernel ran, 0 to 1", *_GPU),
        _where_known(lambda gpu: gpu.busy_ratio),
    ),
    (gauge("manta_gpu_memory_used_bytes", "Memory in use", *_GPU), _where_known(lambda gpu: gpu.memory_used_bytes)),
    (gauge("manta_gpu_memory_bytes", "Memory of the GPU", *_GPU), _where_known(lambda gpu: gpu.memory_total_bytes)),
    (
        gauge("manta_gpu_temperature_celsius", "Temperature of the GPU", *_GPU),
        _where_known(lambda gpu: gpu.temperature_celsius),
    ),
    (gauge("manta_gpu_power_watts", "Power that the GPU draws", *_GPU), _where_known(lambda gpu: gpu.power_watts)),
    (
        counter("manta_gpu_ecc_errors_total", "Memory errors since the driver was loaded", *_GPU, "kind"),
        _memory_errors,
    ),
    (
        counter("manta_gpu_xid_errors_total", "Errors that the driver has reported, by code", *_GPU, "xid"),
        lambda gpu: [((xid,), count) for xid, count in gpu.xids.items()],
    ),
)

FAMILIES: tuple[Family, ...] = tuple(family for family, _ in _OF_GPU)


def gpu_metrics(nodes: Sequence[NodeMeasurements]) -> Iterable[Metric]:
    """All families, empty ones included."""
    return [family.of(_by_gpu(nodes, read)) for family, read in _OF_GPU]


def _by_gpu(nodes: Sequence[NodeMeasurements], read: Read) -> Iterator[tuple[Sequence[str], float]]:
    for node in nodes:
        for gpu in node.gpus:
            for labels, value in read(gpu):
                yield (node.id, node.host, str(gpu.index), *labels), value
