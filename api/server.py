"""The service in one process: control plane, REST, dashboard. `python -m api.server` is what `manta up` starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING

from service.cluster.processes import same_process, start_of, started_in
from service.cluster.ray_head import ExistingRay, RayHead
from service.control_plane import ControlPlane
from service.data_roots import DataRoots
from service.settings import Settings
from workers.errors import MantaError

if TYPE_CHECKING:
    from fastapi import FastAPI

SHUTDOWN_SECONDS = 3
# What the service and all that it starts make (database, logs, checkpoints, snapshots) is for its own user alone.
PRIVATE = 0o077


class PortTaken(MantaError):
    """The address is in use; the message says which."""


class AlreadyRunning(MantaError):
    """A service of the same home runs already."""


class OtherDatabase(MantaError):
    """The home's jobs are in a database that was not named this time."""


def serve(settings: Settings, host: str, port: int, slots: int | None, ray: str | None) -> None:
    """Run the service until SIGTERM or SIGINT. Port 0 picks a free one; `ray`: host:port of somebody else's Ray.

    The jobs run on without it, and the next service of the same home takes them over; `manta down` ends them. Raises
    PortTaken, AlreadyRunning, OtherDatabase, RayUnavailable.
    """
    home, allow_faults = settings.home, settings.allow_faults
    os.umask(PRIVATE)
    home.mkdir(parents=True, exist_ok=True)
    running = running_service(home)
    if running is not None and running["pid"] != os.getpid():
        raise AlreadyRunning(f"a service with home {home} runs already at {running['url']}; end it with `manta down`")
    lock = lock_home(home)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    url = f"http://{host}:{port}"
    head = ExistingRay(ray) if ray else RayHead(home, slots)
    control = ControlPlane(
        home,
        head,
        lambda: _start_over(settings, host, port, slots, allow_faults),
        allow_faults,
        settings.failed_memory_hours * 3600,
        DataRoots.of(settings.data_roots, host),
        settings.database_url,
    )
    _keep_to_database(settings, control.store.location)
    control.start()
    service_file = settings.service_file
    try:
        import uvicorn  # once the jobs are under control, like what `build_app` imports

        app = build_app(control, url, (host, *settings.allowed_hosts))
        _announce(service_file, url, control.store.location)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS, lifespan="on"
        )
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        with contextlib.suppress(OSError):  # a process that is gone is not taken for a service
            service_file.unlink(missing_ok=True)
        control.stop()
        lock.close()


def build_app(control: ControlPlane, url: str, allowed_hosts: Collection[str] = ()) -> FastAPI:
    """REST and dashboard on top of `control`; the dashboard calls the service at `url`. `allowed_hosts`: as for
    `create_app`."""
    from api.app import create_app  # imports FastAPI, which only the server needs
    from api.ui import mount  # and NiceGUI

    app = create_app(control, allowed_hosts)
    mount(app, url)
    return app


def lock_home(home: Path) -> IO[str]:
    """Hold the home until the file is closed: of two services that start at once, one gives way."""
    file = (home / "service.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise AlreadyRunning(f"a service with home {home} runs or starts already; end it with `manta down`") from error
    return file


def _keep_to_database(settings: Settings, location: str) -> None:
    """Note which database this home's jobs are in, without a password. Where none is named it must be the one of the
    last time: with an empty one, nobody would look after what runs. Raises OtherDatabase."""
    record = settings.home / "database"
    known = record.read_text(encoding="utf-8") if record.exists() else location
    if settings.database_url is None and known != location:
        raise OtherDatabase(
            f"the jobs of {settings.home} are in the database {known}: name it with --database or MANTA_DATABASE_URL, "
            f"or remove {record} to begin with an empty one in the home"
        )
    record.write_text(location, encoding="utf-8")


def _start_over(settings: Settings, host: str, port: int, slots: int | None, allow_faults: bool) -> None:
    """Become a fresh service at the same address, which starts a new Ray and takes up the jobs from the database."""
    options = ["--host", host, "--port", str(port), *(["--slots", str(slots)] if slots is not None else [])]
    options += ["--allow-faults"] if allow_faults else []
    environment = {**os.environ, **settings.for_service()}
    os.execve(sys.executable, [sys.executable, "-m", "api.cli", "serve", *options], environment)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another one with --port, or end what uses it"
        ) from error


def _announce(service_file: Path, url: str, database: str) -> None:
    """Say where the service answers, and where its database is, for the commands of the same home."""
    me = os.getpid()
    temporary = service_file.with_suffix(".part")
    temporary.write_text(
        json.dumps({"url": url, "pid": me, "started": start_of(me), "database": database}), encoding="utf-8"
    )
    temporary.rename(service_file)


def running_service(home: Path) -> dict[str, object] | None:
    """What the service of `home` says about itself (`url`, `pid`, `started`, `database`), or None when none runs."""
    try:
        announced = json.loads(Settings(home).service_file.read_text(encoding="utf-8"))
        alive = same_process(int(announced["pid"]), started_in(announced))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return announced if alive else None


def configure_logging() -> None:
    """One line a message on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
