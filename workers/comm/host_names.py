"""Prevents torch from resolving host names.

TCPStore resolves the name of every address that it connects to or accepts a connection from, for its log messages, and
waits for the answer: 5 s if the name server loses the request, 10 s if there is none. After one failed request a
process makes no more, nor do processes forked from it later; so one request is made to fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from datetime import timedelta

ADDRESS = "127.93.17.2"
"""A name of this machine that is in no table of names, so that a name server is asked."""
PATIENCE = timedelta(seconds=5)


class _Resolver(ctypes.Structure):
    """Settings of the C library's resolver, one per thread: the beginning of `struct __res_state` (resolv.h)."""

    _fields_ = (
        ("seconds", ctypes.c_int),
        ("attempts", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("servers", ctypes.c_int),
        ("addresses", ctypes.c_ubyte * 16 * 3),
    )


def skip_reverse_lookups() -> None:
    """From now on TCPStore resolves no names in this process and in those forked from it."""
    # A separate thread, so that all others keep their name servers.
    failing = threading.Thread(target=_fail_once, name="host names")
    failing.start()
    failing.join()


def _fail_once() -> None:
    with contextlib.suppress(OSError):  # this machine has no loopback address of IPv4: names are still resolved
        _query_unanswered()
        connect_once()


def _query_unanswered() -> None:
    """Make this thread send its requests to a closed port. If names come from something other than glibc's resolver
    (another C library, systemd's `resolve` in nsswitch.conf), this has no effect."""
    library = ctypes.CDLL(None)
    try:
        initialize, state = library.__res_init, library.__res_state
    except AttributeError:
        return
    state.restype = ctypes.POINTER(_Resolver)
    initialize()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, socket.inet_aton("127.0.0.1"))
    resolver = state().contents
    resolver.seconds = resolver.attempts = resolver.servers = 1
    ctypes.memmove(resolver.addresses[0], address, len(address))


def connect_once() -> None:
    """Have a store connect to itself, which resolves a name."""
    from torch.distributed import TCPStore

    with socket.create_server((ADDRESS, 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    with contextlib.suppress(RuntimeError):  # this machine cannot even reach itself there: names are still resolved
        TCPStore(
            ADDRESS,
            port,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=descriptor,
        )
