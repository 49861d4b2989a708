"""Bytes of tensors that a rank holds at the peak of a step, counted as they are made and freed."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

if TYPE_CHECKING:
    from torch.distributed._tools.mem_tracker import MemTracker


def tracker_of_bytes() -> MemTracker:
    """A MemTracker that does not say in which module what was made: it cannot where, as in a pipeline, a module runs
    forward for one micro-batch before its backward for another."""
    from torch.distributed._tools.mem_tracker import MemTracker  # brings all of torch's compiler: seconds

    tracker = MemTracker()
    tracker._mod_tracker = mock.MagicMock(is_bw=False, parents=())
    return tracker


def peak_bytes(tracker: MemTracker) -> int:
    """Most that was held on the CPU at once while it counted."""
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
