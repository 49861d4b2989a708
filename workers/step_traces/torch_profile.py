"""torch's own profile of the steps of a trace: every operator and kernel, as a Chrome trace.

It slows down the profiled rank far more than the trace itself, and therefore also the ranks that wait for it.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of a stored profile, compressed."""


class TorchProfile:
    """The profiler of one rank, which runs from its creation to `stop`."""

    def __init__(self, device: torch.device):
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """End the recording."""
        self._profile.stop()

    def content(self) -> bytes | None:
        """A Chrome trace, compressed with gzip; None if it is too large. Takes a while."""
        with tempfile.TemporaryDirectory(prefix="manta-profile-") as folder:
            file = Path(folder) / "profile.json"
            self._profile.export_chrome_trace(str(file))
            content = gzip.compress(file.read_bytes(), 6)
        return content if len(content) <= MAX_BYTES else None
