"""Prepares the next step's micro-batches on a thread while a step computes, so that no step waits for a disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from workers.data.batches import Batches, MicroBatch
from workers.data.skipped_samples import SkippedSamples


class Prefetch:
    """Returns the micro-batches of a step and starts preparing those of the next one. For use by one thread."""

    def __init__(self, batches: Batches, last_step: int):
        """`last_step`: the last step to prepare."""
        self._batches, self._last_step = batches, last_step
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, SkippedSamples, Future[list[MicroBatch]]] | None = None
        """Step, the samples that were skipped when it was begun, and its future result."""

    def training(self, step: int) -> list[MicroBatch]:
        """The replica's micro-batches of step `step` (from 1), whichever step was requested before. Raises the errors
        of `Batches.training`, not before the step is requested."""
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
