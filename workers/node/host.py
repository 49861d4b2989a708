"""What a process can say about its machine: which one it is, the code that it runs, and which addresses it reaches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.workers.protocol.messages import Endpoint, ListeningPorts
from manta.workers.system.sockets import PortRange, listen, outward_address

PACKAGE = Path(__file__).parents[1]

AT_ONCE = 64
"""Number of connections that are tried at the same time."""


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


def listen_for_a_moment(host: str, ports: PortRange | None, count: int, seconds: float) -> ListeningPorts:
    """Accept connections on `count` of `ports` (None: any) for `seconds`; returns which. The kernel accepts them: no
    code has to answer. Raises OSError if no port is free."""
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listen(host, ports)) for _ in range(count)]
        asyncio.get_running_loop().call_later(seconds, opened.pop_all().close)
    return ListeningPorts(host, tuple(int(listener.getsockname()[1]) for listener in listeners))


async def unreached(addresses: Sequence[Endpoint], seconds: float) -> list[Endpoint]:
    """The `addresses` that accept no connection within `seconds`."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def is_reached(address: Endpoint) -> bool:
        async with turn:
            try:
                async with asyncio.timeout(seconds):
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:  # includes timeouts
                return False
            writer.close()
            return True

    reached = await asyncio.gather(*map(is_reached, addresses))
    return [address for address, is_there in zip(addresses, reached, strict=True) if not is_there]
