"""Fits the constants of the links between the GPUs of a node to measured collectives and messages. Pure Python.

The planner's own formulas say how much of a row depends on each constant. Every row counts the same, by the difference
between the logarithms of predicted and measured seconds: if pairs of GPUs have links of their own, the fit yields the
constants of the larger groups, of which there are more rows, and not a mean that holds for neither (decision 0043).
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
"""Rounds of the fit, which converges in fewer; and errors (of a logarithm) up to which they count by their squares, and
the most that one round corrects."""


def fit_links(rows: Sequence[CollectiveTime], machine: Machine) -> Links:
    """The constants of the links inside a node of `machine`. Raises ValueError if rows are missing."""
    per_hop, per_byte = linked(machine, Links(NEVER, 1.0)), linked(machine, Links(1.0, 0.0))
    shares = [(exchange_seconds(row, per_hop), exchange_seconds(row, per_byte), row.seconds) for row in rows]
    hop, byte = least_squares([(*share, share[-1]) for share in shares])
    for _ in range(_ROUNDS):
        hop, byte = least_squares([_corrected(*share, hop, byte) for share in shares])
    errors = [abs(math.log((hops * hop + moved * byte) / seconds)) for hops, moved, seconds in shares]
    return Links(1 / byte, hop, statistics.mean(errors))


def _corrected(hops: float, moved: float, seconds: float, hop: float, byte: float) -> tuple[float, float, float, float]:
    """A row of the next round's least squares: the prediction with these constants, corrected by its error, and scaled
    so that the square counts as the error itself."""
    predicted = hops * hop + moved * byte
    error = max(-_FAR, min(_FAR, math.log(predicted / seconds)))
    return hops, moved, predicted * (1 - error), predicted * math.sqrt(max(_NEAR, abs(error)))


def exchange_seconds(row: CollectiveTime, machine: Machine) -> float:
    """The planner's prediction for a row of a calibration."""
    cluster, group = Cluster(machine, 1, row.ranks), Group(row.ranks, row.ranks)
    if row.kind == "message":
        return message_seconds(cluster, row.size, True)
    return (reduce_seconds if row.kind == "all_reduce" else gather_seconds)(group, cluster, row.size)
