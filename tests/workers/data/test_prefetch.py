"""The next step's micro-batches are made beside the step, and are those that it would have read itself."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_specs import spec

from manta.workers.data.batches import Batches, Prefetch
from manta.workers.data.order import SkippedSamples
from manta.workers.errors import DataError

SECONDS = 60.0


class Watched(Batches):
    """Says which steps were read, by which thread."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.read: list[tuple[int, bool]] = []
        """Step, and whether another thread than the test's read it."""
        self.changed = threading.Condition()
        self.fails: set[int] = set()

    def training(self, step):
        beside = threading.current_thread() is not threading.main_thread()
        try:
            if step in self.fails:
                raise DataError(f"step {step} cannot be read")
            return super().training(step)
        finally:
            with self.changed:
                self.read.append((step, beside))
                self.changed.notify_all()

    def wait_for(self, step):
        """Return once `step` has been read beside the steps."""
        with self.changed:
            assert self.changed.wait_for(lambda: (step, True) in self.read, SECONDS)


@pytest.fixture
def batches(tmp_path):
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(n % 251 for n in range(1000)))
    job = spec(data={"paths": [str(path)]}, parallel={"data": 2})
    return Watched(job, 1, torch.device("cpu"))


def of_its_own(batches, step):
    """What the step reads by itself."""
    return [part.inputs_sb.tolist() for part in Batches.training(batches, step)]


def asked_for(prefetch, step):
    return [part.inputs_sb.tolist() for part in prefetch.training(step)]


def test_next_step_is_prefetched_except_after_the_last_step(batches):
    prefetch = Prefetch(batches, 3)
    for step in (1, 2, 3):
        assert asked_for(prefetch, step) == of_its_own(batches, step)
        if step < 3:
            batches.wait_for(step + 1)
    prefetch.close()
    assert batches.read == [(1, False), (2, True), (3, True)]


def test_prefetch_returns_the_right_batches_for_steps_asked_out_of_order(batches):
    prefetch = Prefetch(batches, 100)
    for step in (1, 7, 7, 2, 3):
        assert asked_for(prefetch, step) == of_its_own(batches, step)
    prefetch.close()


def test_prefetched_step_is_read_again_after_samples_are_skipped(batches):
    prefetch = Prefetch(batches, 100)
    prefetch.training(1)
    batches.wait_for(2)
    before = of_its_own(batches, 2)
    batches.skipped = SkippedSamples.of([range(8, 24)])
    after = asked_for(prefetch, 2)
    assert after == of_its_own(batches, 2) != before
    prefetch.close()


def test_prefetch_that_fails_fails_only_the_step_that_needs_it(batches):
    prefetch = Prefetch(batches, 100)
    batches.fails = {2}
    prefetch.training(1)
    batches.wait_for(2)
    with pytest.raises(DataError, match="step 2 cannot be read"):
        prefetch.training(2)
    assert asked_for(prefetch, 3) == of_its_own(batches, 3)
    prefetch.close()
