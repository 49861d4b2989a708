"""Checks a machine and what a service would use there: for each thing, whether it is sufficient, and if not, what would
help. Nothing is changed, and a check that fails is a finding too."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version
from sqlalchemy.exc import SQLAlchemyError

from manta.service.cluster.ray_head import count_gpus
from manta.service.cluster.ray_private import TRIED_WITH
from manta.service.planner.torch_facts import TorchFailed, torch_facts
from manta.service.revisions import newest_revision
from manta.service.settings import Settings
from manta.service.store import Store, leases
from manta.service.store.errors import StoreEmpty
from manta.service.store.health import refuse_none
from manta.service.store.location import file_of, parse_url, recorded_location, shown, url_in
from manta.service.words import byte_count
from manta.workers.accounting.activation_bytes import host_bytes_of_rank
from manta.workers.accounting.state_costs import (
    checkpoint_bytes,
    copies_bytes,
    frozen_bytes,
    host_state_bytes,
    snapshot_bytes,
)
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.paths import SHARED_MEMORY, Paths
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.host_memory import memory_available
from manta.workers.system.sockets import is_loopback, outward_address

Verdict = Literal["ok", "warning", "problem", "skipped"]
OLDEST_PYTHON, NEXT_PYTHON = (3, 11), (3, 14)
MIN_SHARED_BYTES = 1 << 30
"""If there is less, a container has probably been given the usual 64 MiB."""
MIN_FILES = 4096
MIN_DISK_BYTES = 1 << 30
SOCKET_PATH_BYTES = 107
DISTRIBUTION = "manta-train"
MOUNTS = Path("/proc/self/mounts")
DRIVER = Path("/proc/driver/nvidia/version")
SKEW_SECONDS = 5.0
"""A larger difference between clocks makes times hard to read; S3 refuses clients that are off by 15 minutes."""


@dataclass(frozen=True)
class Finding:
    """One checked thing."""

    subject: str
    """What was checked, in a word or two."""
    verdict: Verdict
    """`problem`: jobs will fail, or the service will not start; `warning`: some jobs may fail; `skipped`: it could not
    or need not be checked."""
    message: str
    """What was seen."""
    advice: str = ""
    """What to do about it."""


Check = Callable[[], Iterable[Finding]]


def checks(settings: Settings, job: JobSpec | None) -> dict[str, Check]:
    """By subject, the checks for a service with these `settings`, and for `job`."""
    paths = Paths.of(settings.home)
    return {
        "Python": python,
        "packages": requirements,
        "torch": torch,
        "Ray": ray,
        "shared memory": lambda: shared_memory(job),
        "host memory": lambda: offloaded(job),
        "limits": limits,
        "disk": lambda: disk(paths.home, job, settings.checkpoints is not None),
        "folders": lambda: folders(paths),
        "network": network,
        "database": lambda: database(settings),
        "checkpoints": lambda: checkpoints(settings.checkpoints),
        "logs": lambda: logs(settings),
        "data": lambda: _data(job, settings.data_roots),
    }


def findings(these: dict[str, Check]) -> Iterator[Finding]:
    """The findings of each check, as soon as it has them."""
    for subject, check in these.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - whatever prevents a check is what its user has to know
            yield Finding(subject, "problem", f"could not be checked: {type(error).__name__}: {error}")


def _data(job: JobSpec | None, roots: tuple[Path, ...] | None) -> Iterator[Finding]:
    """Whether the files that the job reads are here."""
    data = job.data if job is not None else None
    names = () if data is None else (*data.paths, *(name for each in data.validation for name in each.paths))
    weights = (job.model.from_,) if job is not None and job.model.from_ is not None else ()
    for name in (*names, *weights):
        path = Path(name)
        if roots is not None and not any(path.resolve().is_relative_to(root) for root in roots):
            yield Finding("data", "problem", f"{path} is outside the allowed data folders", "see MANTA_DATA_ROOTS")
        elif not path.exists():
            yield Finding("data", "problem", f"{path} does not exist", "it must exist at that path on each node")
        else:
            yield Finding("data", "ok", f"{path} exists")


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
        unusable = f"{folder} cannot be used: {error.strerror}"
        yield Finding("shared memory", "problem", unusable, "mount a tmpfs there: snapshots are stored in it")
        return
    free = min(usage.free, memory_available())
    text = f"{folder} has {byte_count(free)} free of {byte_count(usage.total)}"
    enlarge = "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    if job is not None and job.model.is_counted and (needed := snapshot_bytes(job)):
        text += f"; the snapshots of {job.name} need {byte_count(needed)} on all nodes together"
        place, had = job.checkpoint.snapshots, memory_available()
        room = had if place == "node_memory" else free if place == "shared_memory" else max(free, had)
        if needed > room:
            yield Finding(
                "shared memory",
                "problem",
                f"{text}, and {byte_count(had)} of memory is available here",
                f"spread the job over more nodes, or {enlarge}; parallel.zero: 1 needs less, checkpoint.snapshots: "
                "off nothing",
            )
            return
        if needed > free:
            yield Finding(
                "shared memory", "ok", f"{text}, and will be kept in the memory of the nodes' daemons instead"
            )
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
        f"each rank of {job.name} needs {taken}, {ranks} of them {byte_count(total)}{kept}; {byte_count(had)} of "
        "memory is available"
    )
    if total <= had:
        yield Finding("host memory", "ok", text)
    else:
        yield Finding("host memory", "problem", text, max(parts, key=lambda part: part[1])[2])


def _fewer_copies(job: JobSpec) -> str:
    """What would require fewer copies of a rank's state."""
    if job.recovery.rolls_back:
        return "another policy than roll_back (recovery.nonfinite, recovery.spike.policy)"
    return "checkpoint.snapshots: auto, which needs no extra copy to save from"


def limits() -> Iterator[Finding]:
    """What the kernel permits this user's processes."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} open files per process"
    if files < MIN_FILES:
        advice = f"`ulimit -n {MIN_FILES}` before `manta up`" if most >= MIN_FILES else "raise nofile in limits.conf"
        yield Finding("limits", "warning", text, f"each rank and client needs some: {advice}")
    else:
        yield Finding("limits", "ok", text)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        text = f"{byte_count(locked)} of locked memory per process, with InfiniBand"
        yield Finding("limits", "warning", text, "NCCL registers buffers with the adapter: set memlock to unlimited")


def disk(home: Path, job: JobSpec | None, checkpoints_elsewhere: bool) -> Iterator[Finding]:
    """Whether there is room for what a service writes into its home."""
    folder = next(each for each in (home, *home.parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {byte_count(free)} free"
    needed = MIN_DISK_BYTES
    if job is not None and job.model.is_counted and not checkpoints_elsewhere:
        needed += (job.checkpoint.keep + 1) * checkpoint_bytes(job) + frozen_bytes(job)
        text += f"; {job.checkpoint.keep + 1} checkpoints of {job.name} need {byte_count(needed - MIN_DISK_BYTES)}"
    if free < needed:
        advice = "free some, put the home (MANTA_HOME) elsewhere, or set MANTA_CHECKPOINTS"
        yield Finding("disk", "warning", text, advice)
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
            problem = f"{folder} ({what}): {error.strerror}"
            yield Finding("folders", "problem", problem, "make it readable for this user")
            continue
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            problem = f"{folder} ({what}) does not belong to this user (uid {os.getuid()})"
            yield Finding("folders", "problem", problem, "have its owner remove it, or use another MANTA_HOME")
        elif status.st_mode & 0o077:
            problem = f"{folder} ({what}) is open to others (mode {stat.S_IMODE(status.st_mode):o})"
            yield Finding("folders", "warning", problem, f"chmod 700 {folder}")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Finding("folders", "problem", f"{folder} ({what}) cannot be written", "its file system is read-only")
        else:
            yield Finding("folders", "ok", f"{folder} ({what}) is accessible to this user only")
    longest = len(os.fsencode(paths.ray_folder)) + 60
    if longest > SOCKET_PATH_BYTES:
        problem = f"paths of sockets below {paths.ray_folder} are too long"
        yield Finding("folders", "problem", problem, "run as a user with a shorter uid")


def network() -> Iterator[Finding]:
    """How other machines reach this one."""
    address = outward_address()
    if is_loopback(address):
        yield Finding("network", "warning", "there is no route to other machines", "jobs can use this machine only")
    else:
        yield Finding("network", "ok", f"other machines reach this one at {address}")


def requirements() -> Iterator[Finding]:
    """Whether each package that Manta needs is installed in a suitable version."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warning", f"{DISTRIBUTION} is not installed here", "pip install it, or `make setup`")
        return
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    if _version("torch") is None:  # a separate control plane has none, see `torch`
        needed = [each for each in needed if each.name != "torch"]
    wrong = list(filter(None, map(_wrong, needed)))
    for problem in wrong:
        yield Finding("packages", "problem", problem, f"pip install --upgrade {DISTRIBUTION}")
    if not wrong:
        version = importlib.metadata.version(DISTRIBUTION)
        yield Finding("packages", "ok", f"{DISTRIBUTION} {version} and the {len(needed)} packages it depends on")


def _version(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wrong(wanted: Requirement) -> str | None:
    version = _version(wanted.name)
    if version is None:
        return f"{wanted.name} is not installed"
    return None if wanted.specifier.contains(version, True) else f"{wanted.name} is {version}, not {wanted.specifier}"


def torch(gpus: int | None = None) -> Iterator[Finding]:
    """Whether torch starts, and uses the GPUs that the machine has. `gpus`: their number; None: look."""
    if _version("torch") is None:
        said = "torch is not installed: a control plane can run on this machine, but no ranks"
        yield Finding("torch", "warning", said, "pip install torch, if ranks should run here")
        return
    gpus = count_gpus() if gpus is None else gpus
    try:
        facts = torch_facts()
    except TorchFailed as error:
        yield Finding("torch", "problem", str(error), error.advice)
        return
    yield judge_torch(facts, gpus, driver_version())


def judge_torch(about: dict[str, Any], gpus: int, driver: str | None) -> Finding:
    """The finding from what torch reports about itself (`version`, `cuda`, `nccl`, `devices`) and the number of the
    machine's `gpus`."""
    text = f"torch {about['version']}"
    if not gpus:
        return Finding("torch", "ok", f"{text}; this machine has no GPU, so ranks use CPU slots")
    seen = len(about["devices"])
    if about["cuda"] is None:
        advice = "install a CUDA build of torch, or jobs run on CPU slots (resources.accelerator: cpu)"
        return Finding("torch", "problem", f"{text} is a CPU build, and this machine has {gpus} GPUs", advice)
    text += f", CUDA {about['cuda']}, driver {driver or 'unknown'}, NCCL {about['nccl'] or 'unknown'}"
    if seen < gpus:
        advice = "see nvidia-smi: the driver may be too old for this CUDA, or CUDA_VISIBLE_DEVICES hides some"
        return Finding("torch", "problem", f"{text}: it sees {seen} of {gpus} GPUs", advice)
    return Finding("torch", "ok", f"{text}; GPUs: {', '.join(about['devices'])}")


def driver_version(file: Path = DRIVER) -> str | None:
    """Version of NVIDIA's kernel driver, according to the driver; None if there is none."""
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def ray() -> Iterator[Finding]:
    """Which Ray is installed."""
    version = _version("ray")
    if version is None:
        yield Finding("Ray", "problem", "ray is not installed", "pip install ray")
        return
    oldest, newest = TRIED_WITH
    if Version(oldest) <= Version(version) <= Version(newest):
        yield Finding("Ray", "ok", f"ray {version}")
    else:
        yield Finding("Ray", "warning", f"ray {version}", f"Manta was tested with {oldest} and {newest}")


def database(settings: Settings) -> Iterator[Finding]:
    """Whether the database answers and is of this release; none is created."""
    url = parse_url(url_in(settings.home, settings.database_url))
    noted = recorded_location(settings.home)
    if settings.database_url is None and noted not in (None, shown(url)):
        where = f"the jobs of {settings.home} are in another database, {noted}"
        yield Finding("database", "problem", where, "name it with --database or MANTA_DATABASE_URL")
        return
    file = file_of(url)
    if file is not None and (kind := _file_system_of(file)) in _NETWORK_FILE_SYSTEMS:
        problem = f"{file} is on a network file system ({kind}), whose locks SQLite cannot rely on"
        yield Finding("database", "warning", problem, "put the home on a local disk, or name a PostgreSQL (--database)")
    if file is not None and not file.exists():  # opening it would create its folder
        yield _to_be_made(str(file))
        return
    try:
        with contextlib.closing(Store(url_in(settings.home, settings.database_url))) as store:
            refuse_none(store)
            yield _revision(store)
            if file is None:
                yield _skew("the database", store.query(leases.now) - time.time())
    except StoreEmpty:
        yield _to_be_made(shown(url))
    except (MantaError, SQLAlchemyError) as error:
        yield Finding("database", "problem", str(error), "check that it is running and that its URL is right")


_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.glusterfs", "ceph", "lustre")


def _file_system_of(path: Path) -> str:
    """Type of the file system that has `path`, as the kernel calls it; empty if that is unknown."""
    found = Path("/"), ""
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
            _, at, kind, *_ = line.split(" ")
            mount = Path(at.replace("\\040", " "))
            if path.resolve().is_relative_to(mount) and mount.is_relative_to(found[0]):
                found = mount, kind
    return found[1]


def _to_be_made(place: str) -> Finding:
    return Finding("database", "ok", f"{place} is empty; the first `manta up` creates its tables")


def _revision(store: Store) -> Finding:
    revision, newest = store.revision, newest_revision()
    if revision == newest:
        return Finding("database", "ok", f"{store.location} responds; revision {revision}")
    text = f"{store.location} is at revision {revision}, but this release needs {newest}"
    return Finding("database", "warning", text, "`manta up` migrates an older one; a newer one needs a newer release")


def checkpoints(place: Location | None) -> Iterator[Finding]:
    """Whether files can be written, read and removed where the checkpoints are stored."""
    if place is None:
        yield Finding("checkpoints", "ok", "in the home; MANTA_CHECKPOINTS sets another location")
        return
    yield _usable("checkpoints", place)


def logs(settings: Settings) -> Iterator[Finding]:
    """Whether files can be written, read and removed where logs are stored, if that is not where checkpoints are."""
    if settings.logs is None:
        yield Finding("logs", "ok", "in the home only; MANTA_LOGS sets a second location")
    elif settings.logs == settings.checkpoints:
        yield Finding("logs", "ok", f"in {settings.logs}, with the checkpoints")
    else:
        yield _usable("logs", settings.logs)


def _usable(what: str, place: Location) -> Finding:
    probe = place / f"manta-doctor-{secrets.token_hex(8)}"
    said = secrets.token_bytes(32)
    try:
        files = files_of(place)
        files.make_folder(place)
        files.write_atomically(probe, said)
        try:
            same = files.read(probe) == said
        finally:
            files.remove(probe)
    except (OSError, MantaError) as error:
        advice = (
            "check that it exists and can be reached from here, and that the credentials allow writing and deleting"
        )
        return Finding(what, "problem", f"{place}: {error}", advice)
    if same:
        return Finding(what, "ok", f"{place} can be written, read and deleted from")
    return Finding(what, "problem", f"{place} returns different bytes than were written", "do not use it")


def _skew(whose: str, seconds: float) -> Finding:
    text = f"{whose}'s clock differs from this machine's by {abs(seconds):.1f} s"
    if abs(seconds) > SKEW_SECONDS:
        return Finding("clock", "warning", text, "synchronize both with NTP")
    return Finding("clock", "ok", text)
