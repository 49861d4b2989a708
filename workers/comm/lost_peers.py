"""Classifies errors of torch.distributed that mean a lost peer.

torch raises RuntimeErrors that describe the problem in words only. Only errors that a rank can see when another one
exits or does not respond mean a lost peer, from which the job recovers. All others (mismatched shapes, two ranks on one
GPU, NCCL out of memory) would recur after every recovery: they keep their type and fail the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from manta.workers.errors import PeerLost

OF_THE_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""Errors of a device, which keep their type, whatever happened to peers."""
_OF_THE_STORE = (dist.DistNetworkError, dist.DistStoreError)
"""The rendezvous store does not answer, or a rank that was awaited there."""

_LOST = re.compile(
    r"gloo/transport/|socket (unexpectedly )?closed|connection (closed|reset|refused|was likely closed|timed out)|"
    r"closed by (remote )?peer|broken pipe|no route to host|(network|host) is (unreachable|down)|timed out waiting|"
    r"operation timed out|(connect|socket|wait) timeout|timeout caused pair closure|timed out in monitoredbarrier|"
    r"collective operation timeout|ncclremoteerror|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
"""Messages of torch 2.11 to 2.14, its gloo, and NCCL 2.27 to 2.30. Messages of gloo's transport, which begin with a
file name, are always about a connection."""
_OWN = re.compile(
    r"ncclinvalidargument|ncclinvalidusage|ncclunhandledcudaerror|duplicate gpu|out of memory|enforce fail",
    re.IGNORECASE,
)
"""Messages about this rank itself, although such words may appear in them."""
_ANY_REASON = re.compile(r"ncclsystemerror|ncclinternalerror", re.IGNORECASE)
"""Sockets, memory, libraries: NCCL's last error says which it was."""
_LAST_ERROR = re.compile(r"last error:(.*)", re.IGNORECASE | re.DOTALL)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether `error`, raised by torch.distributed, means that another rank, or the store, is gone or silent."""
    if isinstance(error, OF_THE_DEVICE):
        return False
    if isinstance(error, _OF_THE_STORE):
        return True
    text = str(error)
    if _OWN.search(text):
        return False
    if _ANY_REASON.search(text):
        last_error = _LAST_ERROR.search(text)
        return last_error is not None and _LOST.search(last_error.group(1)) is not None
    return _LOST.search(text) is not None


@contextmanager
def naming_lost_peers(interrupted: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn errors that mean a lost peer into PeerLost. `interrupted`: whether another thread has aborted this rank's
    communication, which can then fail with any message; errors of a device keep their type even then."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OF_THE_DEVICE) or not (interrupted() or is_lost_peer(error)):
            raise
        raise PeerLost(f"communication failed: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The message of `error`, without the stack that torch adds to it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def short_message(error: BaseException) -> str:
    """The message of `error`, without the stack that torch adds to it; for NCCL with its last error."""
    last_error = _LAST_ERROR.search(str(error))
    last = last_error.group(1).strip().splitlines() if last_error else []
    return f"{first_line(error)} ({last[0].strip()})" if last else first_line(error)
