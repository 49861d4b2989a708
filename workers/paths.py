"""Where everything of one Manta service lies on a machine. Pure Python.

Two services with different homes share nothing: the home's hash (`tag`) names the runtime folder in /tmp and the
folder in shared memory. Paths in the runtime folder are short, because a Unix socket's path ends at 107 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from manta.workers.errors import MantaError
from manta.workers.storage.locations import Location

SHARED_MEMORY = Path("/dev/shm")
RUNTIME_FOLDERS = Path("/tmp"), "manta-{user}-{tag}"
"""Where runtime folders lie, and how they are called, by the user's number and the tag of the home."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class UnsafePath(MantaError):
    """A folder that must be ours belongs to another user, or a name would leave its folder."""


class NoHomeFolder(MantaError):
    """The user has no home folder, and none was named."""


def with_home_of_user(path: str | Path) -> Path:
    """`path`, in which ~ stands for the user's home folder. Raises NoHomeFolder, as in containers that run as a user
    without a name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoHomeFolder(f"{path}: this user has no home folder: set MANTA_HOME to a folder of its own") from error


@dataclass(frozen=True)
class Paths:
    """Path arithmetic of the service whose state lies in `home`. Creates nothing unless a method says so."""

    home: Path
    checkpoints: Location | None = None
    """Where the durable checkpoints of all jobs are; None: in the home."""
    installation: str = ""
    """The service's id, by which nodes see if they share its folders (`workers/node/folders.py`); empty: all do."""

    logs: Location | None = None
    """Where the logs of all jobs are kept besides those in the home; None: nowhere."""

    @classmethod
    def of(
        cls, home: str | Path, checkpoints: Location | None = None, installation: str = "", logs: Location | None = None
    ) -> Paths:
        """Paths of a home folder, made absolute so that its tag is the same from everywhere. Raises NoHomeFolder."""
        return cls(with_home_of_user(home).resolve(), checkpoints, installation, logs)

    @property
    def checkpoint_root(self) -> Location:
        """Folder below which the checkpoints of all jobs are."""
        return self.home if self.checkpoints is None else self.checkpoints

    @property
    def tag(self) -> str:
        """Eight hexadecimal digits that tell this service's files from another's."""
        return hashlib.sha256(str(self.home).encode()).hexdigest()[:8]

    @property
    def runtime_folder(self) -> Path:
        """Short folder for sockets and Ray's session; see `make_runtime_folder`."""
        parent, name = RUNTIME_FOLDERS
        return parent / name.format(user=os.getuid(), tag=self.tag)

    @property
    def snapshot_root(self) -> Path:
        """Folder in shared memory that holds one folder of snapshots per job."""
        return SHARED_MEMORY / f"manta-{self.tag}"

    def snapshot_folder(self, job: str) -> Path:
        """Folder in shared memory for the snapshots of `job`. Raises UnsafePath on a name that is none."""
        return self.snapshot_root / safe_name(job)

    def job_folder(self, job: str) -> Path:
        """Folder of all durable files of `job`. Raises UnsafePath on a name that is none."""
        return self.home / "jobs" / safe_name(job)

    def checkpoint_folder(self, job: str) -> Location:
        """Folder of the durable checkpoints of `job`. Raises UnsafePath on a name that is none."""
        return (self.job_folder(job) if self.checkpoints is None else self.checkpoints / safe_name(job)) / "checkpoints"

    def log_folder(self, job: str) -> Path:
        """Folder of the log files of `job`."""
        return self.job_folder(job) / "logs"

    def stored_log_folder(self, job: str) -> Location | None:
        """Folder in which the log of `job` is kept besides that in the home; None: it is not."""
        return None if self.logs is None else self.logs / safe_name(job) / "logs"

    def rank_log(self, job: str, rank: int) -> Path:
        """Log file of one rank over all generations, one JSON object a line."""
        return self.log_folder(job) / f"{rank_stem(rank)}.jsonl"

    @property
    def token_cache(self) -> Path:
        """Folder in which the tokens of corpora are kept, for all jobs."""
        return self.home / "cache" / "tokens"

    @property
    def machines(self) -> Path:
        """Folder of what calibrations have measured, a file per type of node."""
        return self.home / "machines"

    @property
    def ray_record(self) -> Path:
        """File that says which Ray head is ours."""
        return self.home / "ray.json"

    @property
    def ray_token(self) -> Path:
        """File with Ray's authentication token, mode 0600."""
        return self.home / "ray.token"

    @property
    def ray_log(self) -> Path:
        """Output of our Ray head."""
        return self.home / "logs" / "ray.log"

    @property
    def ray_folder(self) -> Path:
        """Ray's temporary folder; short, because Ray puts sockets some 60 characters below it."""
        return self.runtime_folder / "ray"

    def zygote_log(self, node: str) -> Path:
        """Log file of the zygote of one node."""
        return self.home / "logs" / f"zygote-{safe_name(node)[:12]}.log"

    def make_runtime_folder(self) -> Path:
        """Create the runtime folder with mode 0700, or make one of ours so. Raises UnsafePath."""
        return _make_private(self.runtime_folder)

    def make_snapshot_root(self) -> Path:
        """Create the folder in shared memory with mode 0700, or make one of ours so. Raises UnsafePath when another
        user was there first, or could have put something into it."""
        return _make_private(self.snapshot_root)

    def remove_snapshots(self) -> None:
        """Remove all snapshots of this home from this node's shared memory."""
        shutil.rmtree(self.snapshot_root, ignore_errors=True)

    def remove_runtime_folder(self) -> None:
        """Remove the runtime folder and all in it, if it is there."""
        shutil.rmtree(self.runtime_folder, ignore_errors=True)

    def remove_empty_runtime_folder(self) -> None:
        """Remove the runtime folder unless something is in it."""
        with contextlib.suppress(OSError):
            self.runtime_folder.rmdir()


def _make_private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnsafePath(f"{folder} must be a folder that is yours and only you can write to; have it removed.")
    folder.chmod(0o700)
    return folder


def zygote_socket(runtime_folder: str | Path, node: str | None = None) -> Path:
    """Socket of the zygote. With a Ray node id its own per node, for nodes that share one machine."""
    return Path(runtime_folder) / (f"zygote-{node[:12]}.sock" if node else "zygote.sock")


def memory_socket(runtime_folder: str | Path, node: str | None = None) -> Path:
    """Socket of who holds snapshots outside of shared memory, named as that of the zygote."""
    return Path(runtime_folder) / (f"memory-{node[:12]}.sock" if node else "memory.sock")


def rank_stem(rank: int) -> str:
    """Start of the name of each file that belongs to one rank."""
    return f"rank-{rank:05d}"


def safe_name(name: str) -> str:
    """`name`, if it can name a file inside a folder. Raises UnsafePath if it could lead elsewhere."""
    if not _SAFE_NAME.fullmatch(name):
        raise UnsafePath(f"{name!r} cannot name a folder: use letters, digits, '.', '_' and '-'.")
    return name
