"""Torch's version and the GPUs that it sees, asked in a process of its own: neither the service nor its commands ever
import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from manta.workers.errors import MantaError

SECONDS = 120.0
_ASK = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


class TorchFailed(MantaError):
    """Torch does not start, or not in time."""

    def __init__(self, problem: str, advice: str):
        super().__init__(problem)
        self.advice = advice


def torch_facts() -> dict[str, Any]:
    """`version`, `cuda` and `nccl` (versions, or None) and `devices` (the name of each GPU). Raises TorchFailed."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TorchFailed(f"torch did not start within {SECONDS:g} s", "check whether the disk is slow") from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise TorchFailed(f"torch cannot be imported: {last}", "pip install torch")
    facts: dict[str, Any] = json.loads(asked.stdout)
    return facts
