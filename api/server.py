"""The service in one process: control plane, REST, dashboard. `manta serve` runs it, which `manta up` starts in the
background."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from manta.api.serving.local_service import LOCK, LockedFile, announce, running_service, sign, write_atomically
from manta.service import installation_keys
from manta.service.cluster.cluster import NodeOptions
from manta.service.cluster.existing_ray import ExistingRay
from manta.service.cluster.ray_head import RayHead
from manta.service.control.control_plane import ControlPlane
from manta.service.control.options import ControlPlaneOptions, ModelPackages, roots_of
from manta.service.control.takeover import MAX_NAMED
from manta.service.ids import is_job_id
from manta.service.own_files import HomeUnusable, writing_in
from manta.service.settings import DEFAULT_HOST, Settings, Tls
from manta.service.store import Store, keys
from manta.service.store.errors import StoreUnusable
from manta.service.store.health import never_had_jobs
from manta.service.store.location import RECORD, file_of, parse_url, recorded_location, url_in
from manta.service.traces.traces import refuse_without_packages
from manta.workers.errors import MantaError
from manta.workers.storage.files import files_of
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular
from manta.workers.system.sockets import host_and_port, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 3
BACKLOG = 2048
RESTORE_SECONDS = 1.0
"""Between two checks whether the files in the home that others need are still there."""
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than any client or load balancer would use it again (httpx 5 s, AWS's
60 s). A request that meets its connection's end is lost, and its sender cannot know whether it was carried out."""
# Everything that the service and its child processes create (database, logs, checkpoints, snapshots) is for its own
# user only.
PRIVATE = 0o077

EVERY_ADDRESS = {"0.0.0.0": DEFAULT_HOST, "": DEFAULT_HOST, "::": "::1"}
"""The loopback address by which a service that listens everywhere is announced: browsers open no such address."""
ENDED_BY_RAY = 1
"""Exit status of a service whose Ray is gone, for `api/cli/service.py`, which starts it again."""


class PortTaken(MantaError):
    """The address is in use; the message says which."""


class AlreadyRunning(MantaError):
    """A service of the same home runs already."""


class UnprotectedService(MantaError):
    """The service would listen where others can reach it without the necessary protection; the message says which."""


class CertificateUnusable(MantaError):
    """The service cannot use the given certificate and key for TLS; the message names the file."""


class DatabaseMismatch(MantaError):
    """The home's jobs are in a database that was not named this time."""


class DatabaseMissing(MantaError):
    """The home has the files of jobs, and its database knows none."""

    def __init__(self, location: str, folder: Path, jobs: Sequence[str]):
        more = f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
        super().__init__(
            f"the database {location} is missing or has no jobs, but {folder} has the files of "
            f"{', '.join(jobs[:MAX_NAMED])}{more}, which may be running: put the database's file back, with its -wal, "
            "or restore a backup with `manta db restore FILE`; to begin anew without these jobs, move them away: "
            f"`mv {folder} {folder}.old`"
        )


def serve(
    settings: Settings, host: str, port: int, slots: int | None, ray: str | None, wait_for_ray: bool = False
) -> None:
    """Run the service until SIGTERM or SIGINT. Port 0 picks a free one; `ray`: host:port of an existing Ray, which a
    `wait_for_ray` service waits for.

    The jobs run on without it, and the next service of the same home takes them over; `manta down` ends them. Raises
    PortTaken, AlreadyRunning, DatabaseMismatch, DatabaseMissing, UnprotectedService, CertificateUnusable,
    RayUnavailable, KeyFileUnsafe, HomeUnusable, StoreNotInstalled, TracesNotInstalled.
    """
    home, tls = settings.home, settings.tls
    os.umask(PRIVATE)
    refuse_without_protection(settings, host)
    for place in (settings.checkpoints, settings.logs):
        if place is not None:
            files_of(place)
    refuse_without_packages(settings.traces)
    with writing_in(home):
        home.mkdir(parents=True, exist_ok=True)
    running = running_service(home)
    if running is not None and running["pid"] != os.getpid():
        raise AlreadyRunning(f"a service with home {home} runs already at {running['url']}; end it with `manta down`")
    locks = [lock_home(home)]
    with writing_in(home):
        sign(locks[0])
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    scheme = "http" if tls.certificate is None else "https"
    url = f"{scheme}://{host_and_port(EVERY_ADDRESS.get(host, host), port)}"
    control = _control_plane(settings, host, port, slots, ray, wait_for_ray)
    _refuse_lost_database(home, control.store)
    _record_database(settings, control.store.location)
    locks += lock_database(home, settings.database_url)
    control.start()
    service_file = settings.service_file
    try:
        if is_loopback(host):
            installation_keys.ensure_automatic(control.store, home)
        app = build_app(control, settings, host)
        say = partial(announce, service_file, url, control.store.location, tls.certificate)
        say()
        log.info("Manta is up at %s, listening on %s", url, host)
        with _kept(say, control.restore_token, *(lock.keep for lock in locks)):
            _answer_requests(app, settings, listener)
    finally:
        with contextlib.suppress(OSError):  # a process that is gone is not taken for a service
            service_file.unlink(missing_ok=True)
        control.stop()
        for lock in locks:
            lock.close()


@contextlib.contextmanager
def _kept(*files: Callable[[], None]) -> Iterator[None]:
    """During the block, each of these writes its file of the home again as soon as somebody has removed or damaged
    it."""
    done = threading.Event()

    def keep() -> None:
        while not done.wait(RESTORE_SECONDS):
            for write in files:
                try:
                    write()
                except (HomeUnusable, OSError) as error:  # such as a full disk
                    log.warning("%s", error)

    thread = threading.Thread(target=keep, name="files of the home", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _control_plane(
    settings: Settings, host: str, port: int, slots: int | None, ray: str | None, wait_for_ray: bool
) -> ControlPlane:
    """The control plane for `settings`, not started yet; for the other parameters see `serve`. `port`: the actual
    one."""
    home = settings.home
    head = ExistingRay(ray, home, settings.ship_code, wait_for_ray, settings.ports) if ray else RayHead(home, slots)
    shapes = settings.node_shapes if ray else ()
    options = ControlPlaneOptions(
        database_url=settings.database_url,
        checkpoints=settings.checkpoints,
        logs=settings.logs,
        export_roots=settings.export_roots,
        data_roots=roots_of(settings.data_roots, host),
        model_packages=ModelPackages(settings.model_packages),
        memory_seconds=settings.failed_memory_hours * 3600,
        retention_days=settings.jobs_kept_days,
        allow_faults=settings.allow_faults,
        traces=settings.traces,
        nodes=NodeOptions(settings.node_notices, settings.ports, shapes),
    )
    if ray:
        return ControlPlane(home, head, options, lambda: os._exit(ENDED_BY_RAY))
    return ControlPlane(home, head, options, lambda: _start_over(settings, host, port, slots))


def _answer_requests(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    import uvicorn  # after the jobs are under control, like the imports of `build_app`

    from manta.api.serving.connections import HttpServer, limited_to, max_connections

    config = uvicorn.Config(
        app,
        http=limited_to(max_connections()),
        ws="none",  # nothing here uses WebSockets, and the middleware does not handle them
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        lifespan="on",
        ssl_certfile=settings.tls.certificate,
        ssl_keyfile=settings.tls.key,
        # Otherwise an untrusted peer could write any address into the audit.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )
    HttpServer(config, app).run(sockets=[listener])


def build_app(control: ControlPlane, settings: Settings, host: str) -> FastAPI:
    """REST on top of `control`, and the dashboard if it is enabled, with `settings` for a service on `host`."""
    from manta.api.app import create_app  # imports FastAPI, which only the server needs
    from manta.api.security.request_guard import BelowPrefix

    app = create_app(control, settings.allowed_hosts, settings.limits, settings.tls.is_used, host)
    if settings.dashboard:
        from manta.api.ui import mount

        mount(app)
    if settings.path_prefix:
        app.add_middleware(BelowPrefix, prefix=settings.path_prefix)
    return app


def refuse_without_protection(settings: Settings, host: str) -> None:
    """Raise UnprotectedService if the service would listen on a `host` that others can reach without TLS, or before
    anyone has a key; CertificateUnusable."""
    _try_certificate(settings.tls)
    if is_loopback(host):
        return
    if not settings.tls.is_used:
        raise UnprotectedService(
            f"on {host} others could read keys on their way here: give a certificate with --tls-cert and --tls-key, or "
            "use --tls-terminated where a proxy terminates TLS and only it can reach this port; "
            "without --host the service is for this machine only"
        )
    if not _has_any_key(settings):
        raise UnprotectedService(
            f"on {host} the service needs a key before it starts: make one with `manta keys create --admin`, "
            "which prints it once"
        )


def _try_certificate(tls: Tls) -> None:
    """Raises CertificateUnusable."""
    if tls.certificate is None or tls.key is None:
        return
    for file in (tls.certificate, tls.key):
        try:
            read_regular(file, MAX_SETTINGS_BYTES)
        except OSError as error:
            raise CertificateUnusable(f"{file} cannot be read: {error.strerror}; it is the file for TLS") from error
    try:  # with an invalid password, so that the user is not prompted for one
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise CertificateUnusable(
            f"{tls.certificate} and {tls.key} are no certificate and its private key, in PEM and without a password: "
            f"{getattr(error, 'reason', None) or error}"
        ) from error


def _has_any_key(settings: Settings) -> bool:
    url = url_in(settings.home, settings.database_url)
    file = file_of(parse_url(url))
    if file is not None and not file.exists():
        return False
    store = Store(url)
    try:
        return store.query(keys.may_administrate, time.time())
    except SQLAlchemyError:  # of a release that had no keys yet
        return False
    finally:
        store.close()


def lock_home(home: Path) -> LockedFile:
    """Lock the home until the file is closed: of two services that start at the same time, one gives up. Raises
    AlreadyRunning, HomeUnusable."""
    try:
        with writing_in(home):
            return LockedFile(home / LOCK)
    except HomeUnusable as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise AlreadyRunning(f"a service with home {home} runs or starts already; end it with `manta down`") from error


def lock_database(home: Path, url: str | None) -> list[LockedFile]:
    """Lock the database of `home` until the file is closed, if it is an SQLite file: these cannot be shared, not even
    between homes. Returns nothing for a server. Raises AlreadyRunning, StoreUnusable."""
    database = file_of(parse_url(url_in(home, url)))
    if database is None:
        return []
    try:
        return [LockedFile(database.with_name(f"{database.name}.lock"))]
    except BlockingIOError as error:
        raise AlreadyRunning(
            f"another service uses {database} already, and an SQLite file has one at a time: end that one, or let both "
            "share a PostgreSQL database (docs/operations.md, Several control planes)"
        ) from error
    except OSError as error:
        raise StoreUnusable(str(database), error) from error


def _refuse_lost_database(home: Path, store: Store) -> None:
    """Raise DatabaseMissing if the home's jobs are in a database that is gone: with an empty one they would run on
    unseen. Another database than the recorded one is named on purpose. Raises HomeUnusable."""
    folder = home / "jobs"
    if recorded_location(home) not in (None, store.location):
        return
    jobs: list[str] = []
    with writing_in(home), contextlib.suppress(FileNotFoundError):
        jobs = sorted(each.name for each in folder.iterdir() if is_job_id(each.name))
    if jobs and never_had_jobs(store):
        raise DatabaseMissing(store.location, folder, jobs)


def _record_database(settings: Settings, location: str) -> None:
    """Record which database this home's jobs are in, without a password. If none is named it must be the recorded one:
    with an empty one, running jobs would have no owner. Raises DatabaseMismatch, HomeUnusable."""
    record, known = settings.home / RECORD, recorded_location(settings.home)
    if settings.database_url is None and known not in (None, location):
        raise DatabaseMismatch(
            f"the jobs of {settings.home} are in the database {known}: name it with --database or MANTA_DATABASE_URL, "
            f"or begin with an empty one in the home: --database {location}"
        )
    if known != location:
        write_atomically(record, location)


def _start_over(settings: Settings, host: str, port: int, slots: int | None) -> None:
    """Become a new service at the same address, which starts a new Ray and adopts the jobs from the database."""
    os.execve(sys.executable, serve_command(settings, host, port, slots), settings.environment_of_service())


def serve_command(settings: Settings, host: str, port: int, slots: int | None, ray: str | None = None) -> list[str]:
    """The command that runs a service in the foreground, for an environment whose MANTA_HOME is that of `settings`."""
    command = [sys.executable, "-P", "-m", "manta.api.cli", "serve", "--host", host, "--port", str(port)]
    command += ["--slots", str(slots)] if slots is not None else []
    command += ["--ray", ray] if ray is not None else []
    command += ["--allow-faults"] if settings.allow_faults else []
    tls = settings.tls
    if tls.certificate is not None:
        command += ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]
    return command + (["--tls-terminated"] if tls.terminated else [])


def _listen(host: str, port: int) -> socket.socket:
    """IPv4 is preferred for a name that has both, and `::` takes callers of both."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        both = host == "::" and socket.has_dualstack_ipv6()
        family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        why = str(error.strerror).partition(" (while attempting")[0]  # which repeats the address
        advice = "--host takes an address of this machine, such as ::1"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            advice = "choose another one with --port, or end what uses it"
        raise PortTaken(f"cannot listen on {host_and_port(host, port)} ({why}); {advice}") from error


def configure_logging() -> None:
    """One line per message on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
