"""Times of collectives, and of messages, between the ranks of one machine, by number of ranks and size of the tensor:
between its cores, over our links, and between its GPUs, with a process for each, over what jobs use: NCCL. On CPUs the
latter can be rehearsed over gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from manta.workers.calibration.clock import Run, joint_seconds, release
from manta.workers.calibration.device import layout_document
from manta.workers.calibration.local_ranks import LocalRanks, RankDevice
from manta.workers.calibration.measurements import CollectiveTime, ExchangeKind
from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import Axis
from manta.workers.comm.lost_peers import first_line
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.settings import read_visible_gpus

CPU_SIZES = (4096, 65536, 524288, 2097152)
"""Bytes of the whole tensor."""
CPU_ROUNDS, CPU_TIMES = 5, 15


def collective_times(comm: Comm, _: JobSpec) -> list[CollectiveTime]:
    """Program for ranks: the time that each collective of the tensor group adds when it runs between products.

    Collectives one after the other, without products, take about half as long: no rank waits for one that still
    computes, and connections and tensors stay in the caches.
    """
    ranks, times, work = comm.size("tensor"), [], _layer_work(comm.device)
    for size in CPU_SIZES:
        whole = torch.ones(size // 4, device=comm.device)
        part = torch.ones(size // 4 // ranks, device=comm.device)
        gather = partial(comm.all_gather, "tensor", part, whole)
        times.append(CollectiveTime("all_gather", ranks, size, _added_seconds(comm, work, gather)))
        scatter = partial(comm.reduce_scatter, "tensor", whole)
        times.append(CollectiveTime("reduce_scatter", ranks, size, _added_seconds(comm, work, scatter)))
    return times


def _layer_work(device: torch.device) -> Run:
    """About the work of a small layer between two collectives."""
    tokens, weight = (torch.randn(rows, 256, device=device) for rows in (128, 256))

    def run() -> None:
        for _ in range(2):
            torch.relu_(torch.mm(tokens, weight) + 1.0)

    return run


def _added_seconds(comm: Comm, work: Run, collective: Run) -> float:
    """Seconds that `collective` adds to `work`: the median over CPU_ROUNDS; not negative."""

    def both() -> None:
        work()
        collective()

    both()  # allocates memory
    added = [_seconds(comm, both) - _seconds(comm, work) for _ in range(CPU_ROUNDS)]
    return max(0.0, statistics.median(added))


def _seconds(comm: Comm, run: Run) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(CPU_TIMES):
        run()
    comm.barrier()
    return (time.perf_counter() - began) / CPU_TIMES


GPU_SIZES = (2**12, 2**15, 2**18, 2**20, 2**23, 2**26, 2**28)
"""Bytes of the whole tensor, or of a message."""
MIN_TIMES, MAX_TIMES, MOVED = 3, 20, 2**27
"""Fewest and most runs of a round, and the bytes of all of them in between."""
SECONDS = 120.0
"""Seconds for the pairs, and for all together: NCCL may hang if GPUs cannot reach each other's memory."""

OnRank = tuple[str, list[CollectiveTime]]
"""A rank's measurements, and the name of its GPU."""


class MixedGpus(MantaError):
    """The GPUs are of several kinds, so no two constants describe the links between them."""


def gpu_devices() -> list[RankDevice]:
    """A place on each GPU that this process sees. Creates no context on any of them."""
    count = torch.cuda.device_count()
    named = [each.strip() for each in read_visible_gpus().split(",") if each.strip()]
    names = (named or [str(each) for each in range(count)])[:count]
    return [RankDevice("cuda:0", "process_groups", name) for name in names]


def between_gpus(
    devices: Sequence[RankDevice], say: Callable[[str], None], sizes: Sequence[int] = GPU_SIZES
) -> tuple[list[CollectiveTime], str | None]:
    """Measurements of collectives and messages between these GPUs; or none, and why. `say` is called with the name of
    the next part: first pairs of neighbouring GPUs, all pairs at once, and then all GPUs together. This matches plans,
    in which all groups of a kind communicate at the same time."""
    if len(devices) < 2:
        return [], "there is one GPU"
    rows: list[CollectiveTime] = []
    try:
        gangs = LocalRanks()
        for what, axes, ranks in _gangs(len(devices)):
            say(f"links between {what}")
            document = layout_document(**axes)
            results = gangs.run(exchange_times, document, sizes, seconds=SECONDS, devices=devices[:ranks])
            rows.extend(of_all(results))
    except MantaError as error:
        return [], str(error)
    except (OSError, RuntimeError) as error:
        return [], f"{type(error).__name__}: {first_line(error)}"
    return rows, None


def _gangs(count: int) -> Iterator[tuple[str, dict[str, int], int]]:
    """For each round: what it measures, the layout, and its number of ranks."""
    pairs = count // 2
    if pairs > 1:
        yield "pairs of GPUs", {"tensor": 2, "data": pairs}, 2 * pairs
    yield f"{count} GPUs", {"pipeline": count}, count


def of_all(results: Sequence[OnRank]) -> list[CollectiveTime]:
    """The rows of a gang's ranks, combined into those of the slowest, for which the others wait. Raises MixedGpus."""
    if len(names := sorted({name for name, _ in results})) > 1:
        raise MixedGpus(f"they are of several kinds: {', '.join(names)}")
    alike = zip(*(rows for _, rows in results), strict=True)
    return [replace(rows[0], seconds=max(row.seconds for row in rows)) for rows in alike]


def exchange_times(comm: Comm, _: JobSpec, sizes: Sequence[int]) -> OnRank:
    """Program for ranks: collectives of the tensor group, or else of all ranks, and messages along the pipeline."""
    device, rows = comm.device, []
    for size in sizes:
        times = max(MIN_TIMES, min(MAX_TIMES, MOVED // size))
        for kind, ranks, moved, run in _operations(comm, size):
            rows.append(CollectiveTime(kind, ranks, moved, joint_seconds(run, times, comm.barrier, device)))
    release()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", rows


def _operations(comm: Comm, size: int) -> Iterator[tuple[ExchangeKind, int, int, Run]]:
    """Operations on about `size` bytes: kind, number of ranks, bytes, and a function that runs it once."""
    axis: Axis = "tensor" if comm.size("tensor") > 1 else "world"
    ranks = comm.size(axis)
    part = torch.zeros(size // 4 // ranks, device=comm.device)
    whole = torch.zeros(ranks * len(part), device=comm.device)
    yield "all_gather", ranks, whole.nbytes, lambda: comm.all_gather(axis, part, whole)
    yield "reduce_scatter", ranks, whole.nbytes, lambda: comm.start_reduce_scatter(axis, whole, part)[1].wait()
    yield "all_reduce", ranks, whole.nbytes, lambda: comm.all_reduce(axis, whole)
    if axis == "world":
        incoming = torch.zeros_like(whole)
        yield "message", ranks, whole.nbytes, lambda: _pass_on(comm, whole, incoming)


def _pass_on(comm: Comm, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Each rank sends to the next one, and receives from the one before it."""
    stage, last = comm.index("pipeline"), comm.size("pipeline") - 1
    works: list[Handle] = []
    if stage > 0:
        works.append(comm.receive(stage - 1, incoming))
    if stage < last:
        works.append(comm.send(stage + 1, outgoing))
    for work in works:
        work.wait()
