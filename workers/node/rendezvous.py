"""The rendezvous store of a job: a separate process, hosted neither by rank 0 nor by the driver."""

from __future__ import annotations

import json
import resource
import socket

import psutil
from torch.distributed import TCPStore

from manta.workers.protocol.json_codec import JsonObject, from_json, to_json
from manta.workers.protocol.messages import StoreArgument, StorePort
from manta.workers.system.resources import RESERVED_FILES, raise_limit
from manta.workers.system.sockets import listen

BACKLOG = 1024
MAX_CONNECTIONS = 16_384
"""Number of connections for which the store makes room, if that is permitted: each rank has several."""

MEMORY_BYTES = 512 * 1024 * 1024
"""Memory that the store may allocate: anyone who reaches its port may write to it, and a store without memory is only
replaced, whereas a machine without memory is not. An entry of a rank has some hundred bytes."""


def run(argument: JsonObject, control: socket.socket) -> int:
    """Serve a TCPStore at the host and on one of the ports in `argument`, a StoreArgument, until the other side closes
    `control`.

    Sends a StorePort on `control` once it serves. Returns the exit code. Raises OSError if the host is not ours.
    """
    wanted = from_json(StoreArgument, argument)
    # Uses a listening socket of our own, because TCPStore's would be open on every interface of the machine.
    raise_limit(MAX_CONNECTIONS + RESERVED_FILES)
    listener = listen(wanted.host, wanted.ports, BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        wanted.host, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )
    _limit_memory()
    control.sendall(json.dumps(to_json(StorePort(store.port))).encode() + b"\n")
    while control.recv(4096):
        pass
    return 0


def _limit_memory() -> None:
    """Let this process allocate no more than MEMORY_BYTES from now on."""
    most = psutil.Process().memory_info().data + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
