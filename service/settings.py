"""Settings of the service and its clients from the environment. No other module of `api` and `service` reads a setting
from the environment; `workers/settings.py` reads what the engine needs when it runs without the service."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from manta.service.cluster.node_shapes import InvalidNodeShapes, NodeShape, shapes_in
from manta.workers.errors import MantaError
from manta.workers.node.notice_sources import UnknownSource, notice_sources
from manta.workers.paths import with_home_of_user
from manta.workers.storage.locations import InvalidLocation, Location, ObjectPath, parse_location
from manta.workers.system.sockets import InvalidPortRange, PortRange

T = TypeVar("T")
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8400
_KEY = "MANTA_API_KEY"
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
SECRETS = (
    *(_KEY, "MANTA_DATABASE_URL", "PGPASSWORD"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
)
"""Variables that may contain a key or a password, which nothing that a job runs may see."""


class InvalidSetting(MantaError):
    """A variable of the environment has an invalid value."""


@dataclass(frozen=True)
class RequestLimits:
    """How much one caller may ask of the service."""

    requests_per_second: float = 500.0
    """Sustained requests per second of one key, with bursts of twice as many (MANTA_REQUESTS_PER_SECOND); 0: no
    limit."""
    requests_at_once: int = 1000
    """Open requests of one key, including streams (MANTA_REQUESTS_AT_ONCE)."""
    streams_at_once: int = 600
    """Open streams of one key (MANTA_STREAMS_AT_ONCE)."""
    anonymous_per_second: float = 20.0
    """Requests per second from one address without a valid key (MANTA_ANONYMOUS_PER_SECOND); 0: no limit."""


@dataclass(frozen=True)
class Tls:
    """Where TLS between the service and its clients ends."""

    certificate: Path | None = None
    """PEM file with the service's certificate and any intermediate ones (MANTA_TLS_CERT)."""
    key: Path | None = None
    """PEM file with its private key (MANTA_TLS_KEY)."""
    terminated: bool = False
    """Whether a proxy, which alone can reach the service, terminates TLS (MANTA_TLS_TERMINATED=1)."""

    def __post_init__(self) -> None:
        """Raises InvalidSetting."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidSetting(
                "a certificate needs its private key and the other way round: --tls-cert and --tls-key"
            )

    @property
    def is_used(self) -> bool:
        """Whether clients use TLS."""
        return self.terminated or self.certificate is not None


@dataclass(frozen=True)
class Settings:
    """What the environment says about where Manta keeps its state and where its service answers."""

    home: Path
    """Folder of the service's state: database, checkpoints, logs, address of the running service (MANTA_HOME)."""
    url: str | None = None
    """Base address of the service that clients use (MANTA_URL). None: the service running in the home."""
    allow_faults: bool = False
    """Whether the service injects faults into jobs on request (MANTA_ALLOW_FAULTS=1, or `manta up --allow-faults`)."""

    allowed_hosts: tuple[str, ...] = ()
    """Additional host names of the service, such as a proxy's, each with its port unless that is 80 or, with TLS, 443
    (MANTA_ALLOWED_HOSTS, separated by commas)."""
    failed_memory_hours: float = 24.0
    """Hours that the snapshots of a failed job stay in shared memory for `manta retry` (MANTA_FAILED_MEMORY_HOURS); 0:
    they are removed at once."""
    data_roots: tuple[Path, ...] | None = None
    """Folders below which jobs may read data (MANTA_DATA_ROOTS, separated by colons). None: any folder if the service
    listens on a loopback address only, otherwise none."""
    database_url: str | None = field(default=None, repr=False)
    """URL of the job database, such as postgresql://USER@HOST/NAME (MANTA_DATABASE_URL, or `manta up --database`).
    None: an SQLite file in the home."""
    api_key: str | None = field(default=None, repr=False)
    """API key that clients send (MANTA_API_KEY). None: the automatic key in the home."""
    tls: Tls = Tls()
    """TLS of the service (MANTA_TLS_CERT, MANTA_TLS_KEY, MANTA_TLS_TERMINATED, or options of the same names)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-For` is trusted (MANTA_TRUSTED_PROXIES, separated by commas)."""
    path_prefix: str = ""
    """Path below which a proxy shows the service (MANTA_PATH_PREFIX, such as /manta), whether or not the proxy removes
    it. Empty: none."""
    limits: RequestLimits = RequestLimits()
    """How much one caller may ask of the service."""
    jobs_kept_days: float = 0.0
    """Days after its end until a job is deleted with its checkpoints (MANTA_JOBS_KEPT_DAYS); 0: never."""
    checkpoints: Location | None = None
    """Where the checkpoints of all jobs are stored (MANTA_CHECKPOINTS, such as `s3://bucket/manta` or a folder that all
    nodes share). None: in the home."""
    logs: Location | None = None
    """Where the logs of all jobs are stored in addition to the home's disk (MANTA_LOGS, `home` for nowhere else). None:
    in the object store of MANTA_CHECKPOINTS, if that is one."""
    node_notices: str | None = None
    """Sources that nodes poll for notices of their removal: aws, gcp, azure, kubernetes, slurm (MANTA_NODE_NOTICES,
    separated by commas). None: no source is polled."""
    ports: PortRange | None = None
    """Ports on which the processes on the nodes listen, for firewalls (MANTA_PORTS, such as 20000-20999). None: any."""
    ship_code: bool = False
    """Whether nodes of an existing Ray run this installation's code instead of their own (MANTA_SHIP_CODE=1)."""
    node_shapes: tuple[NodeShape, ...] = ()
    """Nodes that the autoscaler of an existing Ray can add (MANTA_NODE_SHAPES, such as `workers=4x8 slots`). Empty:
    nothing is requested from an autoscaler."""
    model_packages: tuple[str, ...] = ()
    """Installed packages from which jobs may use models (MANTA_MODEL_PACKAGES, separated by commas)."""
    traces: str | None = None
    """Address of an OpenTelemetry collector that receives the starts and recoveries of jobs, by OTLP over HTTP
    (MANTA_TRACES, such as http://collector:4318). None: they are not sent."""
    export_roots: tuple[Path, ...] = ()
    """Folders below which weights may be exported over REST (MANTA_EXPORT_ROOTS, separated by colons). Empty: `exports`
    in the home."""
    dashboard: bool = True
    """Whether the service serves a dashboard; without one it starts faster (MANTA_NO_DASHBOARD=1 turns it off)."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables that the fields name from `environment`, by default the process's own; MANTA_HOME defaults
        to ~/.manta. Raises InvalidSetting, NoHomeFolder."""
        source = os.environ if environment is None else environment
        home = with_home_of_user(source.get("MANTA_HOME") or "~/.manta").absolute()
        if not _is_text(str(home)):
            raise InvalidSetting(f"the home {home!s:.200} cannot be named in this locale: set PYTHONUTF8=1")
        return cls(
            home=home,
            url=source.get("MANTA_URL") or None,
            allow_faults=_switch(source, "MANTA_ALLOW_FAULTS"),
            allowed_hosts=_hosts(source, "MANTA_ALLOWED_HOSTS"),
            failed_memory_hours=_number(source, "MANTA_FAILED_MEMORY_HOURS", cls.failed_memory_hours, below=1e6),
            data_roots=_folders(source, "MANTA_DATA_ROOTS"),
            database_url=source.get("MANTA_DATABASE_URL") or None,
            api_key=_key(source),
            tls=_tls(source),
            trusted_proxies=_networks(source, "MANTA_TRUSTED_PROXIES"),
            path_prefix=_prefix(source, "MANTA_PATH_PREFIX"),
            limits=_limits(source),
            jobs_kept_days=_number(source, "MANTA_JOBS_KEPT_DAYS", cls.jobs_kept_days),
            checkpoints=_place(source, "MANTA_CHECKPOINTS"),
            logs=_logs(source),
            node_notices=_parsed(source, "MANTA_NODE_NOTICES", _notices),
            ports=_parsed(source, "MANTA_PORTS", PortRange.of),
            ship_code=_switch(source, "MANTA_SHIP_CODE"),
            node_shapes=_parsed(source, "MANTA_NODE_SHAPES", shapes_in) or (),
            model_packages=_names(source, "MANTA_MODEL_PACKAGES"),
            traces=_collector(source, "MANTA_TRACES"),
            export_roots=_folders(source, "MANTA_EXPORT_ROOTS") or (),
            dashboard=not _switch(source, "MANTA_NO_DASHBOARD"),
        )

    def environment_of_service(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """`environment`, by default the process's own, for a service of this home and database: without the key of
        whoever starts it. A database's URL can only be passed in this way, since every user can read the arguments of a
        process."""
        source = os.environ if environment is None else environment
        database = {} if self.database_url is None else {"MANTA_DATABASE_URL": self.database_url}
        return {
            **{name: value for name, value in source.items() if name != _KEY},
            "MANTA_HOME": str(self.home),
            **database,
        }

    @property
    def service_file(self) -> Path:
        """JSON file `{"url", "pid"}` in which a running embedded service says where it answers."""
        return self.home / "service.json"


def _is_text(path: str) -> bool:
    """False if the encoding of file names, that of the locale, lacks some of its characters."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key(source: Mapping[str, str]) -> str | None:
    """A key with characters that were copied along with it, such as a line end, could not be sent; no error shows any
    of it."""
    key = source.get(_KEY, "").strip()
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise InvalidSetting(
            f"{_KEY} is not a valid key: it has characters that keys do not have; `manta keys create` prints one"
        )
    return key or None


def _tls(source: Mapping[str, str]) -> Tls:
    return Tls(_file(source, "MANTA_TLS_CERT"), _file(source, "MANTA_TLS_KEY"), _switch(source, "MANTA_TLS_TERMINATED"))


def _limits(source: Mapping[str, str]) -> RequestLimits:
    usual = RequestLimits()
    return RequestLimits(
        requests_per_second=_number(source, "MANTA_REQUESTS_PER_SECOND", usual.requests_per_second),
        requests_at_once=int(_number(source, "MANTA_REQUESTS_AT_ONCE", usual.requests_at_once)),
        streams_at_once=int(_number(source, "MANTA_STREAMS_AT_ONCE", usual.streams_at_once)),
        anonymous_per_second=_number(source, "MANTA_ANONYMOUS_PER_SECOND", usual.anonymous_per_second),
    )


def _switch(source: Mapping[str, str], name: str) -> bool:
    return source.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def _names(source: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, (each.strip() for each in source.get(name, "").split(","))))


def _hosts(source: Mapping[str, str], name: str) -> tuple[str, ...]:
    hosts = _names(source, name)
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None or int(match["port"] or DEFAULT_PORT) not in range(1, 65536):
            raise InvalidSetting(
                f"{name} names {host!r}; it takes names such as manta.example.org, example.org:8443 or [fe80::1]:8400"
            )
    return hosts


def _prefix(source: Mapping[str, str], name: str) -> str:
    prefix = (source.get(name) or "").rstrip("/")
    if prefix and not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._~-]*)+", prefix):
        raise InvalidSetting(f"{name} is {prefix!r}; it takes a path such as /manta")
    return prefix


def _file(source: Mapping[str, str], name: str) -> Path | None:
    return Path(source[name]).expanduser().absolute() if source.get(name) else None


def _parsed(source: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """What `parse` makes of a variable; None if it is not set."""
    text = source.get(name)
    try:
        return parse(text) if text else None
    except (InvalidLocation, InvalidNodeShapes, InvalidPortRange, UnknownSource) as error:
        raise InvalidSetting(f"{name}: {error}") from error


def _place(source: Mapping[str, str], name: str) -> Location | None:
    place = _parsed(source, name, parse_location)
    return place.expanduser().absolute() if isinstance(place, Path) else place


def _logs(source: Mapping[str, str]) -> Location | None:
    said = source.get("MANTA_LOGS", "").strip()
    if said.lower() == "home":
        return None
    if said:
        return _place(source, "MANTA_LOGS")
    checkpoints = _place(source, "MANTA_CHECKPOINTS")
    return checkpoints if isinstance(checkpoints, ObjectPath) else None


def _notices(text: str) -> str:
    notice_sources(text)
    return text


def _collector(source: Mapping[str, str], name: str) -> str | None:
    text = source.get(name, "").strip()
    if not text:
        return None
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if "@" in text:
        raise InvalidSetting(
            f"{name} must not contain a user or password; OTEL_EXPORTER_OTLP_HEADERS can hold a secret"
        )
    if not good or url.query or url.fragment:
        raise InvalidSetting(f"{name} is {text!r}; it takes the address of a collector such as http://collector:4318")
    return text


def _networks(source: Mapping[str, str], name: str) -> tuple[str, ...]:
    networks = _names(source, name)
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise InvalidSetting(
                f"{name} names {network!r}; it takes addresses and networks such as 10.0.0.0/8"
            ) from error
    return networks


def _number(source: Mapping[str, str], name: str, default: float, below: float = 1e9) -> float:
    text = source.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < below:
        raise InvalidSetting(f"{name} is {text!r}; it must be a number of 0 or more, below {below:,.0f}")
    return number


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for processes that are not the service."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def _folders(source: Mapping[str, str], name: str) -> tuple[Path, ...] | None:
    folders = tuple(Path(each).expanduser() for each in (source.get(name) or "").split(os.pathsep) if each)
    for folder in folders:
        if not folder.is_absolute():
            raise InvalidSetting(f"{name} names {folder}; each of its folders must be an absolute path")
    return folders or None
