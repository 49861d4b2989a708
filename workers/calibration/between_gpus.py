"""Collectives and messages between the GPUs of this machine, a process for each, over what jobs communicate with there:
NCCL. CPUs rehearse it over gloo.

Two GPUs each, all pairs of neighbours at once, and then all GPUs together: as plans have it, whose groups communicate
while all others of their kind do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from workers.calibration.clock import Run, joint_seconds, release
from workers.calibration.local_ranks import LocalRanks, Place
from workers.calibration.measurements import CollectiveTime, ExchangeKind
from workers.calibration.steps import layout_document
from workers.comm.backend import Handle
from workers.comm.comm import Comm
from workers.comm.grid import Axis
from workers.comm.lost_peers import first_line
from workers.config import JobSpec
from workers.errors import MantaError
from workers.settings import read_visible_gpus

SIZES = (2**12, 2**15, 2**18, 2**20, 2**23, 2**26, 2**28)
"""Bytes of the whole tensor, or of a message."""
LEAST_TIMES, MOST_TIMES, MOVED = 3, 20, 2**27
"""Runs of a round, and bytes of all of them where that leaves it between both."""
SECONDS = 120.0
"""For the pairs, and for all together: NCCL may wait for ever where GPUs do not reach each other's memory."""

OnRank = tuple[str, list[CollectiveTime]]
"""What a rank has measured, and the name of its GPU."""


class UnlikeGpus(MantaError):
    """No two constants say what lies between GPUs of several kinds."""


def gpu_places() -> list[Place]:
    """A place on each GPU that this process sees. Makes no context on any of them."""
    count = torch.cuda.device_count()
    named = [each.strip() for each in read_visible_gpus().split(",") if each.strip()]
    names = (named or [str(each) for each in range(count)])[:count]
    return [Place("cuda:0", "process_groups", name) for name in names]


def between_gpus(
    places: Sequence[Place], say: Callable[[str], None], sizes: Sequence[int] = SIZES
) -> tuple[list[CollectiveTime], str | None]:
    """What collectives and messages between these GPUs take; or nothing, and why. `say` is told what is measured
    next."""
    if len(places) < 2:
        return [], "there is one GPU"
    rows: list[CollectiveTime] = []
    try:
        gangs = LocalRanks()
        for what, axes, ranks in _gangs(len(places)):
            say(f"links between {what}")
            document = layout_document(**axes)
            results = gangs.run(exchange_times, document, sizes, seconds=SECONDS, places=places[:ranks])
            rows.extend(of_all(results))
    except MantaError as error:
        return [], str(error)
    except (OSError, RuntimeError) as error:
        return [], f"{type(error).__name__}: {first_line(error)}"
    return rows, None


def _gangs(count: int) -> Iterator[tuple[str, dict[str, int], int]]:
    """What they are between, the layout, and how many ranks it has."""
    pairs = count // 2
    if pairs > 1:
        yield "pairs of GPUs", {"tensor": 2, "data": pairs}, 2 * pairs
    yield f"{count} GPUs", {"pipeline": count}, count


def of_all(results: Sequence[OnRank]) -> list[CollectiveTime]:
    """The rows of the ranks of a gang as those of the slowest, for whom others wait. Raises UnlikeGpus."""
    if len(names := sorted({name for name, _ in results})) > 1:
        raise UnlikeGpus(f"they are of several kinds: {', '.join(names)}")
    alike = zip(*(rows for _, rows in results), strict=True)
    return [replace(rows[0], seconds=max(row.seconds for row in rows)) for rows in alike]


def exchange_times(comm: Comm, _: JobSpec, sizes: Sequence[int]) -> OnRank:
    """Program for ranks: collectives of the tensor group; where there is none those of all ranks, and messages along
    the pipeline."""
    device, rows = comm.device, []
    for size in sizes:
        times = max(LEAST_TIMES, min(MOST_TIMES, MOVED // size))
        for kind, ranks, moved, run in _runs(comm, size):
            rows.append(CollectiveTime(kind, ranks, moved, joint_seconds(run, times, comm.barrier, device)))
    release()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", rows


def _runs(comm: Comm, size: int) -> Iterator[tuple[ExchangeKind, int, int, Run]]:
    """Of about `size` bytes: what is done, between how many ranks, bytes, and one run of it."""
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
    """Each rank sends to the next one, while the one before it sends to it."""
    stage, last = comm.index("pipeline"), comm.size("pipeline") - 1
    works: list[Handle] = []
    if stage > 0:
        works.append(comm.receive(stage - 1, incoming))
    if stage < last:
        works.append(comm.send(stage + 1, outgoing))
    for work in works:
        work.wait()
