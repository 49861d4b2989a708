"""ZB-H2, zero-bubble pipelining in twice the memory of 1F1B (Qi et al., arXiv:2401.10241, section 2.2). Pure Python.

The engine does not run it: its first rank holds 2p - 1 micro-batches where that of 1F1B and ZB-H1 holds p. It exists
for comparing its time with the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.schedules.one_forward_one_backward import alternate
from manta.workers.schedules.schedule import Action, Schedule, of_all
from manta.workers.schedules.zero_bubble_h1 import with_late_weights


def zero_bubble_h2(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B with twice the warm-up, in which rank r does the weights' half 2 r micro-batches later.

    The warm-up's forwards fill the bubble at the start, the deferred weights' halves the one at the end.
    """
    passes = alternate(of_all("forward", micro_batches), of_all("backward", micro_batches), 2 * (stages - rank - 1))
    return with_late_weights(passes, 2 * rank, micro_batches)


ZERO_BUBBLE_H2 = Schedule(name="zb-h2", passes=zero_bubble_h2, splits_backward=True, runs=False)
