"""The machine: Python, shared memory, limits, disk, folders, network. Nothing is changed."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from manta.service.cluster.ray_head import count_gpus
from manta.service.doctor import Finding
from manta.service.words import byte_count
from manta.workers.accounting.activation_bytes import host_bytes_of_rank
from manta.workers.accounting.state_costs import checkpoint_bytes, copies_bytes, host_state_bytes, snapshot_bytes
from manta.workers.config import JobSpec
from manta.workers.paths import SHARED_MEMORY, Paths
from manta.workers.system.resources import memory_available
from manta.workers.system.sockets import LOOPBACK, outward_address

OLDEST_PYTHON, NEXT_PYTHON = (3, 11), (3, 14)
MIN_SHARED_BYTES = 1 << 30
"""If there is less, a container has probably been given the usual 64 MiB."""
MIN_FILES = 4096
MIN_DISK_BYTES = 1 << 30
SOCKET_PATH_BYTES = 107


def python() -> Iterator[Finding]:
    """The interpreter."""
    version = sys.version_info[:2]
    text = f"Python {sys.version.split()[0]} at {sys.executable}"
    if OLDEST_PYTHON <= version < NEXT_PYTHON:
        yield Finding("Python", "ok", text)
    else:
        yield Finding("Python", "problem", text, "install Manta with Python 3.11, 3.12 or 3.13")


def shared_memory(job: JobSpec | None, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Whether the snapshots of `job` fit, or those of a typical job."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield Finding(
            "shared memory",
            "problem",
            f"{folder} cannot be used: {error.strerror}",
            "mount a tmpfs there: snapshots lie in it",
        )
        return
    free = min(usage.free, memory_available())
    text = f"{folder} has {byte_count(free)} free of {byte_count(usage.total)}"
    enlarge = "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    if job is not None and job.model.is_counted and (needed := snapshot_bytes(job)):
        text += f"; the snapshots of {job.name} take {byte_count(needed)} over all nodes"
        place, had = job.checkpoint.snapshots, memory_available()
        room = had if place == "node_memory" else free if place == "shared_memory" else max(free, had)
        if needed > room:
            yield Finding(
                "shared memory",
                "problem",
                f"{text}, and this one can have {byte_count(had)} of memory",
                f"spread the job over more nodes, or {enlarge}; parallel.zero: 1 takes less, checkpoint.snapshots: "
                "off nothing",
            )
            return
        if needed > free:
            yield Finding("shared memory", "ok", f"{text}, and lie in the memory of the nodes' daemons instead")
            return
    if usage.total < MIN_SHARED_BYTES:
        yield Finding("shared memory", "warning", text, f"most jobs need more: {enlarge}")
    else:
        yield Finding("shared memory", "ok", text)


def offloaded(job: JobSpec | None, gpus: int | None = None) -> Iterator[Finding]:
    """Whether offloaded activations, offloaded optimizer state, copies of the state and snapshots fit into host memory,
    for as many ranks of `job` as there may be here. `gpus`: of this machine; None: look."""
    if job is None or not job.model.is_counted:
        return
    each = [
        (host_bytes_of_rank(job, stage, job.micro_batches), host_state_bytes(job, stage), copies_bytes(job, stage))
        for stage in range(job.layout.pipeline)
    ]
    activations, state, copies = max(each, key=sum)
    if not activations + state + copies:
        return
    world, had = job.layout.world_size, memory_available()
    ranks = min(world, (count_gpus() if gpus is None else gpus) or world)
    parts = (
        ("activations", activations, "fewer parallel.offload_layers, or parallel.recompute: full"),
        ("the optimizer's state", state, "train.optimizer.offload: false, or more replicas with parallel.zero: 1"),
        ("copies of its state", copies, f"{_fewer_copies(job)}, or more replicas with parallel.zero: 1"),
    )
    taken = " and ".join(f"{byte_count(size)} for {what}" for what, size, _ in parts if size)
    snapshots = snapshot_bytes(job) * ranks // world
    total = ranks * (activations + state + copies) + snapshots
    kept = f", with {byte_count(snapshots)} for their snapshots" if snapshots else ""
    text = (
        f"each rank of {job.name} takes {taken}, {ranks} of them {byte_count(total)}{kept}; {byte_count(had)} of "
        "memory can be had"
    )
    if total <= had:
        yield Finding("host memory", "ok", text)
    else:
        yield Finding("host memory", "problem", text, max(parts, key=lambda part: part[1])[2])


def _fewer_copies(job: JobSpec) -> str:
    """What would require fewer copies of a rank's state."""
    if job.recovery.rolls_back:
        return "another policy than roll_back (recovery.nonfinite, recovery.spike.policy)"
    return "checkpoint.snapshots: auto, which takes no copy more to save from"


def limits() -> Iterator[Finding]:
    """What the kernel permits this user's processes."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} open files a process"
    if files < MIN_FILES:
        advice = f"`ulimit -n {MIN_FILES}` before `manta up`" if most >= MIN_FILES else "raise nofile in limits.conf"
        yield Finding("limits", "warning", text, f"ranks and clients each take some: {advice}")
    else:
        yield Finding("limits", "ok", text)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        text = f"{byte_count(locked)} of locked memory a process, with InfiniBand"
        yield Finding("limits", "warning", text, "NCCL registers buffers with the adapter: set memlock to unlimited")


def disk(home: Path, job: JobSpec | None, checkpoints_elsewhere: bool) -> Iterator[Finding]:
    """Whether there is room for what a service writes into its home."""
    folder = next(each for each in (home, *home.parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {byte_count(free)} free"
    needed = MIN_DISK_BYTES
    if job is not None and job.model.is_counted and not checkpoints_elsewhere:
        needed += (job.checkpoint.keep + 1) * checkpoint_bytes(job)
        text += f"; {job.checkpoint.keep + 1} checkpoints of {job.name} take {byte_count(needed - MIN_DISK_BYTES)}"
    if free < needed:
        yield Finding(
            "disk", "warning", text, "free some, put the home (MANTA_HOME) elsewhere, or set MANTA_CHECKPOINTS"
        )
    else:
        yield Finding("disk", "ok", text)


def folders(paths: Paths) -> Iterator[Finding]:
    """Whether the folders are accessible only by this user."""
    ours = (("home", paths.home), ("sockets", paths.runtime_folder), ("snapshots", paths.snapshot_root))
    for what, folder in ours:
        try:
            status = folder.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Finding(
                "folders", "problem", f"{folder} ({what}): {error.strerror}", "make it readable for this user"
            )
            continue
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            problem = f"{folder} ({what}) is not a folder of this user's (uid {os.getuid()})"
            yield Finding("folders", "problem", problem, "have its owner remove it, or use another MANTA_HOME")
        elif status.st_mode & 0o077:
            problem = f"{folder} ({what}) is open to others (mode {stat.S_IMODE(status.st_mode):o})"
            yield Finding("folders", "warning", problem, f"chmod 700 {folder}")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Finding("folders", "problem", f"{folder} ({what}) cannot be written", "its file system is read-only")
        else:
            yield Finding("folders", "ok", f"{folder} ({what}) is this user's alone")
    longest = len(os.fsencode(paths.ray_folder)) + 60
    if longest > SOCKET_PATH_BYTES:
        yield Finding(
            "folders",
            "problem",
            f"sockets below {paths.ray_folder} have too long names",
            "use a user with a shorter number",
        )


def network() -> Iterator[Finding]:
    """How other machines reach this one."""
    address = outward_address()
    if address == LOOPBACK:
        yield Finding("network", "warning", "no way leads out of this machine", "jobs can use this machine alone")
    else:
        yield Finding("network", "ok", f"other machines reach this one at {address}")
