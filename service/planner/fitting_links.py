"""What lies between the GPUs of a node, fitted on what collectives and messages take there. Pure Python.

How much of a row goes by either constant, the planner's own formulas say. Every row counts the same, by how far the
logarithms of told and measured seconds are apart: where pairs of GPUs have links of their own, the constants are those
of the larger groups, of which there are more rows, and not a mean that holds for neither (decision 0043).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from service.planner.communication import Group, gather_seconds, message_seconds, reduce_seconds
from service.planner.fitting import NEVER, least_squares
from service.planner.hardware import Cluster, Links, Machine, linked
from workers.calibration.measurements import CollectiveTime

_ROUNDS, _NEAR, _FAR = 60, 0.02, 0.5
"""Of the fit, which ends in fewer; errors (of a logarithm) up to which they count by their squares, and beyond which a
round corrects no more of them."""


def fit_links(rows: Sequence[CollectiveTime], machine: Machine) -> Links:
    """What the links inside a node of `machine` reach. Raises ValueError where rows are missing."""
    per_hop, per_byte = linked(machine, Links(NEVER, 1.0)), linked(machine, Links(1.0, 0.0))
    shares = [(exchange_seconds(row, per_hop), exchange_seconds(row, per_byte), row.seconds) for row in rows]
    hop, byte = least_squares([(*share, share[-1]) for share in shares])
    for _ in range(_ROUNDS):
        hop, byte = least_squares([_corrected(*share, hop, byte) for share in shares])
    errors = [abs(math.log((hops * hop + moved * byte) / seconds)) for hops, moved, seconds in shares]
    return Links(1 / byte, hop, statistics.mean(errors))


def _corrected(hops: float, moved: float, seconds: float, hop: float, byte: float) -> tuple[float, float, float, float]:
    """A row of the next round's least squares: what is told with these constants, corrected by its error; its square
    counts as the error itself."""
    told = hops * hop + moved * byte
    error = max(-_FAR, min(_FAR, math.log(told / seconds)))
    return hops, moved, told * (1 - error), told * math.sqrt(max(_NEAR, abs(error)))


def exchange_seconds(row: CollectiveTime, machine: Machine) -> float:
    """What the planner says of a row of a calibration."""
    cluster, group = Cluster(machine, 1, row.ranks), Group(row.ranks, row.ranks)
    if row.kind == "message":
        return message_seconds(cluster, row.size, True)
    return (reduce_seconds if row.kind == "all_reduce" else gather_seconds)(group, cluster, row.size)
