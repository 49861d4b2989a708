"""What torch's own profiler says of the steps of a trace: every operator and kernel, as a Chrome trace.

That costs the profiled rank far more than the trace itself, and with it the ranks that wait for it.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MOST_BYTES = 16 * 1024 * 1024
"""Of a profile as it is kept, compressed."""


class TorchProfile:
    """The profiler of one rank, which runs from here to `stop`."""

    def __init__(self, device: torch.device):
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """Profile no longer."""
        self._profile.stop()

    def content(self) -> bytes | None:
        """A Chrome trace, compressed by gzip; None where it is too large. Takes a while."""
        with tempfile.TemporaryDirectory(prefix="manta-profile-") as folder:
            file = Path(folder) / "profile.json"
            self._profile.export_chrome_trace(str(file))
            content = gzip.compress(file.read_bytes(), 6)
        return content if len(content) <= MOST_BYTES else None
