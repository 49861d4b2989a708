"""The next step's micro-batches, built on a thread while a step computes, so that none waits for a disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from workers.data.batches import Batches, MicroBatch
from workers.data.skipped_samples import SkippedSamples


class Prefetch:
    """Hands out the micro-batches of steps; each time it begins with those of the next one. For one thread."""

    def __init__(self, batches: Batches, last_step: int):
        """`last_step`: after it nothing is built ahead."""
        self._batches, self._last_step = batches, last_step
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, SkippedSamples, Future[list[MicroBatch]]] | None = None
        """Step, the samples that were skipped when it was begun, and what comes of it."""

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1), whichever step was asked for before. Raises what
        `Batches.training` does, not before the step is asked for."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (step, self._batches.skipped):
            made = ahead[2].result()
        else:
            made = self._batches.training(step)
        if step < self._last_step:
            self._ahead = step + 1, self._batches.skipped, self._thread.submit(self._batches.training, step + 1)
        return made

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
