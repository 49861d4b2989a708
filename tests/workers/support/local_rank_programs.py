"""What ranks do in tests of `manta.workers.calibration.local_ranks`."""

from __future__ import annotations

import os
import signal
import sys

import torch

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.errors import DataError


def see(_: Comm, __: JobSpec) -> tuple[str | None, bool]:
    """The GPU that this process sees, and whether CUDA was asked for anything before."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized()


def fail(comm: Comm, _: JobSpec, how: str) -> None:
    """Rank 1 ends in some way, and the others wait for it."""
    if comm.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaves":
            sys.exit(3)
        if how == "hangs":
            signal.pause()
        if how == "says":
            raise DataError("nothing is here")
        raise RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error\nLast error:\nno shared memory\n"
        )
    comm.barrier()


def threads(_: Comm, __: JobSpec) -> int:
    """With how many threads this rank computes."""
    return torch.get_num_threads()
