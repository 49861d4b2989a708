"""What a process can say about the machine it runs on. Pure Python."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Host:
    """A machine, as seen from one process on it."""

    name: str
    address: str
    """IP address under which other nodes reach it."""
    node: str | None
    """Ray's id of the node, hexadecimal; None outside of Ray."""
    devices: tuple[str, ...]
    """GPUs that Ray gave to this process, as CUDA_VISIBLE_DEVICES takes them."""


def this_host() -> Host:
    """This machine. Ray is asked only where this process runs inside it: nothing here imports Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return Host(socket.gethostname(), _address(), None, ())
    devices = tuple(str(device) for device in ray.get_gpu_ids())
    node = ray.get_runtime_context().get_node_id()
    return Host(socket.gethostname(), ray.util.get_node_ip_address(), node, devices)


def _address() -> str:
    """Address of the interface that leads out of this machine. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"  # no network at all
        return str(probe.getsockname()[0])
