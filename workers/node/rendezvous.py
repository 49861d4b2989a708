"""The rendezvous store of a job: a process of its own, hosted by neither rank 0 nor the driver."""

from __future__ import annotations

import json
import socket

from torch.distributed import TCPStore

from workers.protocol.json_codec import JsonObject, from_json, to_json
from workers.protocol.messages import StoreArgument, StorePort

BACKLOG = 1024


def run(argument: JsonObject, control: socket.socket) -> int:
    """Serve a TCPStore on a free port of the host in `argument`, a StoreArgument, until `control` is closed by the
    other side.

    Says a StorePort on `control` once it serves. Returns the exit code. Raises OSError if the host is not ours.
    """
    host = from_json(StoreArgument, argument).host
    # Our own listening socket, because TCPStore's would be open on every interface of the machine.
    listener = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )
    control.sendall(json.dumps(to_json(StorePort(store.port))).encode() + b"\n")
    while control.recv(4096):
        pass
    return 0


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
