"""Environment variables that a job may set for its trainers. Pure Python.

NCCL, gloo and the GPU's allocator read them when they are first used and have no other settings. A name is allowed if
its value affects the speed or selects the network. Names of files to write or of libraries to load are not allowed,
since trainers have the operator's rights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from manta.workers.config import JobSpec
from manta.workers.spec.problems import Problem

_NCCL = (
    "ALGO", "ALLOC_P2P_NET_LL_BUFFERS", "BUFFSIZE", "CGA_CLUSTER_SIZE", "COLLNET_ENABLE", "CROSS_NIC",
    "CUMEM_ENABLE", "DEBUG", "DEBUG_SUBSYS", "DMABUF_ENABLE", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER",
    "IB_ADAPTIVE_ROUTING", "IB_AR_THRESHOLD", "IB_DISABLE", "IB_FIFO_TC", "IB_GID_INDEX", "IB_HCA",
    "IB_MERGE_NICS", "IB_PCI_RELAXED_ORDERING", "IB_QPS_PER_CONNECTION", "IB_RETRY_CNT", "IB_SL",
    "IB_SPLIT_DATA_ON_QPS", "IB_TC", "IB_TIMEOUT", "IGNORE_CPU_AFFINITY", "LOCAL_REGISTER", "MAX_CTAS",
    "MAX_NCHANNELS", "MAX_P2P_NCHANNELS", "MIN_CTAS", "MIN_NCHANNELS", "MIN_P2P_NCHANNELS", "MNNVL_ENABLE",
    "NCHANNELS_PER_NET_PEER", "NET_GDR_C2C", "NET_GDR_LEVEL", "NET_GDR_READ", "NSOCKS_PERTHREAD", "NTHREADS",
    "NVB_DISABLE", "NVLS_CHUNKSIZE", "NVLS_ENABLE", "OOB_NET_IFNAME", "P2P_DISABLE", "P2P_LEVEL",
    "P2P_NET_CHUNKSIZE", "PROTO", "PXN_DISABLE", "SHM_DISABLE", "SOCKET_FAMILY", "SOCKET_IFNAME",
    "SOCKET_NTHREADS", "SOCKET_RETRY_CNT", "WORK_FIFO_BYTES",
)  # fmt: skip
_OTHERS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
ALLOWED = frozenset({*(f"NCCL_{name}" for name in _NCCL), *_OTHERS})
"""Names that `resources.environment` may have."""
MAX_CHARACTERS = 1000
"""Maximum length of a value."""


def environment_is_allowed(spec: JobSpec) -> Iterator[Problem]:
    """Checks that all names are in the list of safe ones, and that values are valid in a process's environment."""
    for name, value in spec.resources.environment.items():
        path = f"resources.environment.{name}"
        if name not in ALLOWED:
            near = difflib.get_close_matches(name.upper(), sorted(ALLOWED), 1)
            rule = (
                "not allowed; a job may set the variables of NCCL, gloo and the allocator listed in docs/parallelism.md"
            )
            yield Problem(path, rule, near[0] if near else None)
        elif len(value) > MAX_CHARACTERS or not value.isprintable():
            yield Problem(path, f"a value has at most {MAX_CHARACTERS} characters, all of them printable")
