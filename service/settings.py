"""What the environment says to the service and its clients. No other module of `api` and `service` takes a setting from
the environment; `workers/settings.py` reads what torchrun says to the engine when it runs without the service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.errors import MantaError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8400
SECRETS = ("MANTA_DATABASE_URL", "PGPASSWORD")
"""Variables that may hold a password, which nothing that a job runs may see."""


class BadSetting(MantaError):
    """A variable of the environment says something that is none of its values."""


@dataclass(frozen=True)
class Settings:
    """What the environment says about where Manta keeps its state and where its service answers."""

    home: Path
    """Folder of the embedded state: database, checkpoints, logs, address of the running service (MANTA_HOME)."""
    url: str | None = None
    """Base address of the service that the client talks to (MANTA_URL); None: the one running in `home`."""
    allow_faults: bool = False
    """Whether the service makes faults in jobs on request (MANTA_ALLOW_FAULTS=1, or `manta up --allow-faults`)."""

    allowed_hosts: tuple[str, ...] = ()
    """Names under which the service may be reached beside this machine's own, such as a proxy's (MANTA_ALLOWED_HOSTS,
    separated by commas)."""
    failed_memory_hours: float = 24.0
    """How long the snapshots of a job that failed stay in shared memory for `manta retry`
    (MANTA_FAILED_MEMORY_HOURS); 0: they go at once."""
    data_roots: tuple[Path, ...] | None = None
    """Folders below which jobs may read data (MANTA_DATA_ROOTS, separated by colons); None: `DataRoots.of` says which,
    by the address on which the service listens."""
    database_url: str | None = field(default=None, repr=False)
    """Where the job database is (MANTA_DATABASE_URL, or `manta up --database`), as `service.store.location` reads it;
    None: in the home."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read MANTA_HOME (default ~/.manta), MANTA_URL, MANTA_ALLOW_FAULTS, MANTA_ALLOWED_HOSTS, MANTA_DATA_ROOTS,
        MANTA_DATABASE_URL and MANTA_FAILED_MEMORY_HOURS from `environment`, by default the process's own. Raises
        BadSetting."""
        source = os.environ if environment is None else environment
        home = Path(source.get("MANTA_HOME") or "~/.manta").expanduser().absolute()
        allow_faults = source.get("MANTA_ALLOW_FAULTS", "").strip().lower() in ("1", "true", "yes", "on")
        hours = _hours(source.get("MANTA_FAILED_MEMORY_HOURS") or "24")
        hosts = tuple(filter(None, (name.strip() for name in source.get("MANTA_ALLOWED_HOSTS", "").split(","))))
        roots = _folders(source.get("MANTA_DATA_ROOTS") or "")
        database = source.get("MANTA_DATABASE_URL") or None
        return cls(home, source.get("MANTA_URL") or None, allow_faults, hosts, hours, roots, database)

    def for_service(self) -> dict[str, str]:
        """The variables by which another process becomes a service of the same home and database. A database's URL has
        no other way there: everybody can read the arguments of a process."""
        database = {} if self.database_url is None else {"MANTA_DATABASE_URL": self.database_url}
        return {"MANTA_HOME": str(self.home), **database}

    @property
    def service_file(self) -> Path:
        """JSON file `{"url", "pid"}` in which a running embedded service says where it answers."""
        return self.home / "service.json"


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for processes that are not the service."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def _folders(text: str) -> tuple[Path, ...] | None:
    folders = tuple(Path(each).expanduser() for each in text.split(os.pathsep) if each)
    for folder in folders:
        if not folder.is_absolute():
            raise BadSetting(f"MANTA_DATA_ROOTS names {folder}; each of its folders must be an absolute path")
    return folders or None


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < 1e6:
        raise BadSetting(f"MANTA_FAILED_MEMORY_HOURS is {text!r}; it must be a number of hours such as 24, or 0")
    return hours
