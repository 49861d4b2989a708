"""What a process can say about the machine it runs on, and the code that it runs."""

from __future__ import annotations

import functools
import hashlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.system.ports import outward_address

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Host:
    """A machine, as seen from one process on it."""

    name: str
    address: str
    """IP address under which other nodes reach it."""
    node: str | None
    """Ray's id of the node, hexadecimal; None outside of Ray."""
    devices: tuple[str, ...]
    """GPUs that Ray gave to this process, in the form of CUDA_VISIBLE_DEVICES."""


def visible(devices: Sequence[str]) -> dict[str, str]:
    """Environment of a process that is to see these GPUs and no others, whatever it inherits."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def this_host() -> Host:
    """This machine. Ray is asked only if this process runs inside it: nothing here imports Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return Host(socket.gethostname(), outward_address(), None, ())
    devices = tuple(str(device) for device in ray.get_gpu_ids())
    node = ray.get_runtime_context().get_node_id()
    return Host(socket.gethostname(), ray.util.get_node_ip_address(), node, devices)


@functools.cache
def own_code() -> str:
    """Sixteen hexadecimal digits of a SHA-256 over the source files of `workers`."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
