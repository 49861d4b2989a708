"""Requested traces of this rank's job: they wait here until the step before their first one. Pure Python."""

from __future__ import annotations

import threading

from workers.protocol.messages import TraceOrder

MAX_STEPS = 20
"""Of one trace."""


class TraceOrders:
    """The orders of one trainer, through its generations. Any thread may ask; the training thread takes them."""

    def __init__(self) -> None:
        self._waiting: dict[int, TraceOrder] = {}
        self._begun: set[tuple[int, int]] = set()
        self._late: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def ask(self, order: TraceOrder) -> None:
        """Want a trace. One that was wanted before, or has begun, is not wanted twice: a control plane that takes over
        asks again."""
        with self._lock:
            if (order.generation, order.number) not in self._begun:
                self._waiting[order.number] = order
            else:
                self._late |= {(order.number, rank) for rank in order.profiler_ranks}

    def came_late(self, number: int, rank: int) -> bool:
        """Whether an order to profile `rank` for that trace came after it had begun."""
        return (number, rank) in self._late

    def due(self, generation: int, step: int) -> TraceOrder | None:
        """The first order of this generation whose recording may begin with `step`; None if there is none. Orders of
        earlier generations are forgotten."""
        if not self._waiting:
            return None
        with self._lock:
            self._waiting = {number: each for number, each in self._waiting.items() if each.generation >= generation}
            ready = [
                each for each in self._waiting.values() if each.generation == generation and each.first_step <= step
            ]
        return min(ready, key=lambda each: each.number, default=None)

    def take(self, generation: int, number: int) -> TraceOrder | None:
        """The recording of that trace begins; returns its order, None if this rank has none."""
        with self._lock:
            self._begun.add((generation, number))
            return self._waiting.pop(number, None)
