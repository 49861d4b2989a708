"""Which errors of torch.distributed are lost peers. Messages are those of torch 2.13 (gloo: seen; NCCL: as torch's
`DistBackendError` and NCCL put them together), with addresses made up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from manta.workers.comm.lost_peers import is_lost_peer, naming_lost_peers
from manta.workers.errors import PeerLost

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
INTERNAL = "ncclInternalError: Internal check failed."
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."

LOST = {
    "a peer's end": RuntimeError(
        f"{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:56526. This is typically caused by a remote "
        "worker crashing. Check the logs of the remote worker before reporting an error."
    ),
    "a peer's kernel": RuntimeError(f"{GLOO}/pair.cc:547] Read error [127.0.0.1]:1183: Connection reset by peer"),
    "a message to nobody": RuntimeError(f"{GLOO}/pair.cc:460] writev [127.0.0.1]:1183: Broken pipe"),
    "a message over what is closed": RuntimeError(f"{GLOO}/pair.cc:812] Socket closed [127.0.0.1]:1183"),
    "a connection that is closed while it is made": RuntimeError("Socket unexpectedly closed [127.0.0.1]:1183"),
    "silence": RuntimeError(
        f"{GLOO}/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete. This typically "
        "indicates a remote process crash."
    ),
    "silence of another's": RuntimeError("Application timeout caused pair closure"),
    "nobody there": RuntimeError(
        "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error: Connect "
        "timeout [10.0.0.2]:41220"
    ),
    "a rank that did not come": dist.DistStoreError("wait timeout after 20000ms, keys: /generation-3/0/rank_1"),
    "no store": dist.DistNetworkError("The client socket has timed out after 20000ms while trying to connect"),
    "NCCL: a peer's end": dist.DistBackendError(
        f"{NCCL}, remote process exited or there was a network error, NCCL version 2.29.7\n{REMOTE}\nLast error:\n"
        "socketProgressOpt: Call to recv from 10.0.0.2<41220> failed : Connection reset by peer"
    ),
    "NCCL: nobody there": dist.DistBackendError(
        f"{NCCL}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n{SYSTEM}\n"
        "Last error:\nsocketPollConnect: connect to 10.0.0.2<41220> returned Connection refused, exceeded error retry"
    ),
    "NCCL: silence": dist.DistBackendError(
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for "
        "1800033 milliseconds before timing out."
    ),
    "NCCL: aborted": dist.DistBackendError("NCCL communicator was aborted on rank 2."),
}

OWN = {
    "shapes": RuntimeError(
        "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
        "op.nbytes. 400 vs 40. Received data size doesn't match expected size."
    ),
    "enforced": RuntimeError("[enforce fail at ../gloo/transport/tcp/pair.cc:446] connection closed: no such thing"),
    "sizes": ValueError("output tensor size must be equal to world_size times input tensor size"),
    "types": RuntimeError("Invalid scalar type"),
    "NCCL: two ranks on one GPU": dist.DistBackendError(
        f"{NCCL}, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\n{USAGE}\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 31000"
    ),
    "NCCL: no memory": dist.DistBackendError(
        f"{NCCL}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "NCCL: no shared memory": dist.DistBackendError(
        f"{NCCL}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n{SYSTEM}\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-3 (size 9637888), error: No space left"
    ),
    "NCCL: a defect": dist.DistBackendError(
        f"{NCCL}, internal error - please report this issue to the NCCL developers\n{INTERNAL}\nLast error:\n"
        "Attribute busid of node nic not found"
    ),
    "no library": dist.DistBackendError(f"{NCCL}, unhandled system error, NCCL version 2.29.7\n{SYSTEM}"),
    "no memory": torch.OutOfMemoryError("CUDA out of memory. connection reset"),
}


@pytest.mark.parametrize("what", LOST)
def test_error_of_a_gone_or_silent_peer_is_named_peer_lost(what):
    assert is_lost_peer(LOST[what])
    line = str(LOST[what]).splitlines()[0]
    with pytest.raises(PeerLost) as caught, naming_lost_peers():
        raise LOST[what]
    assert str(caught.value) == f"communication failed: {line}"


@pytest.mark.parametrize("what", OWN)
def test_errors_of_the_ranks_own_making_keep_their_type(what):
    with pytest.raises(type(OWN[what])) as caught, naming_lost_peers():
        raise OWN[what]
    assert caught.value is OWN[what]


def test_runtime_error_after_the_ranks_communication_was_aborted_is_peer_lost():
    with pytest.raises(PeerLost, match="Invalid scalar type"), naming_lost_peers(lambda: True):
        raise OWN["types"]


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "AcceleratorError"])
def test_device_error_is_not_taken_for_a_lost_peer(kind):
    with pytest.raises(getattr(torch, kind)), naming_lost_peers(lambda: True):
        raise getattr(torch, kind)("an illegal memory access was encountered; connection reset")
