"""`manta up`, `manta down`, `manta serve`: starting and stopping the service, and restarting one that Ray's
library terminates without notice, when a new head node responds at the address of the previous one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from manta.api.cli.main import EXIT_BAD_INPUT, Json, app
from manta.api.client import ApiError, Client, ServiceUnreachable
from manta.api.serving.local_service import closes_without_answer, running_service, service_process
from manta.service.cluster.existing_ray import end_raylet
from manta.service.cluster.processes import wait_until_ended
from manta.service.cluster.ray_head import RayHead
from manta.service.own_files import OwnFileUnusable, read_key, read_own, writing_in
from manta.service.settings import DEFAULT_HOST, DEFAULT_PORT, Settings, Tls
from manta.service.states import JobState
from manta.workers.errors import MantaError
from manta.workers.paths import Paths
from manta.workers.system.processes import ParentDeathSignal
from manta.workers.system.sockets import is_loopback

if TYPE_CHECKING:  # imported where it is needed: on a busy machine that takes half a minute
    from manta.service.store import Job

log = logging.getLogger(__name__)

UP_SECONDS, DOWN_SECONDS, POLL_SECONDS = 240.0, 60.0, 0.1
UNRESPONSIVE_SECONDS = 30.0
"""How long a running service may leave requests without an answer before `manta up` replaces it."""
ABORTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})
"""Signals by which a process may terminate itself. Signals sent by others, such as SIGKILL, are meant to end it."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RESTART_PAUSE_SECONDS = 1.0
"""Delay before a restart, so that a service that ends immediately does not use a whole core."""


def _without_brackets(host: str) -> str:
    """An IPv6 address as it is written in a URL is one, too."""
    return host.removeprefix("[").removesuffix("]")


Host = Annotated[str, typer.Option("--host", help="Address to listen on.", callback=_without_brackets)]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
Slots = Annotated[
    int | None, typer.Option("--slots", min=1, help="Number of CPU ranks that fit, in addition to GPUs; default: 16.")
]
Ray = Annotated[
    str | None, typer.Option("--ray", metavar="HOST:PORT", help="Use this Ray cluster instead of starting one.")
]
WaitForRay = Annotated[
    bool, typer.Option("--wait-for-ray", help="Wait until the cluster of --ray responds, without a time limit.")
]
AllowFaults = Annotated[
    bool, typer.Option("--allow-faults", help="Allow `manta inject` to kill, stop and disturb processes of jobs.")
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="PEM file of the service's certificate.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its private key.")]
TlsTerminated = Annotated[
    bool,
    typer.Option("--tls-terminated", help="A proxy handles TLS with the clients, and only it can reach this port."),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="The job database, such as postgresql://USER@HOST/NAME; default: MANTA_DATABASE_URL, or the home.",
    ),
]


class NotStarted(MantaError):
    """The service did not start; the message has the reason."""


@app.command()
def up(
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    slots: Slots = None,
    ray: Ray = None,
    allow_faults: AllowFaults = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_terminated: TlsTerminated = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Start the service in the background."""
    home = Settings.from_environment().home
    url, running = "", _running_and_well(home)
    if running is None:
        from manta.api import server

        settings = _with_options(settings_with(database), allow_faults, tls_cert, tls_key, tls_terminated)
        server.refuse_without_protection(settings, host)
        try:
            url = start_service(settings, host, port, slots, ray)
        except NotStarted:
            if (running := _running_and_well(home)) is None:  # otherwise another `manta up` was faster
                raise
    if running is not None:
        answer = {"url": running["url"], "home": str(home), "started": False}
        typer.echo(json.dumps(answer) if as_json else f"Manta is already running: {running['url']}")
        return
    if as_json:
        typer.echo(json.dumps({"url": url, "home": str(home), "started": True}))
        return
    everywhere = " and this machine's other addresses" if host in server.EVERY_ADDRESS else ""
    typer.echo(f"Manta is up: {url}{everywhere} (home: {home})")
    if settings.dashboard and read_key(home) is not None and is_loopback(host):
        with Client.of_home(home) as client:
            typer.echo(f"Dashboard, link valid once: {url}{client.link().path} (`manta link` prints another one)")


def _running_and_well(home: Path) -> dict[str, object] | None:
    """What the service of `home` has published, once it answers; None if none runs. One that hangs is ended: its jobs
    train on, and the next service takes them over."""
    began = time.monotonic()
    while (pid := service_process(home)) is not None:
        running = running_service(home)  # None: it starts, or its file was removed, which it writes again
        if running is not None and not closes_without_answer(str(running["url"])):
            return running
        limit = UP_SECONDS if running is None else UNRESPONSIVE_SECONDS
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not wait_until_ended([process], POLL_SECONDS) and time.monotonic() - began > limit:
                typer.echo(
                    f"The service (process {pid}) does not respond and is being replaced; jobs keep training.", err=True
                )
                process.kill()
                wait_until_ended([process], DOWN_SECONDS)
    return None


def _with_options(
    settings: Settings, allow_faults: bool, tls_cert: Path | None, tls_key: Path | None, tls_terminated: bool
) -> Settings:
    """`settings`, overridden by the command's options."""
    tls = settings.tls
    if tls_cert is not None or tls_key is not None:
        tls = Tls(tls_cert and tls_cert.absolute(), tls_key and tls_key.absolute(), tls.terminated)
    tls = replace(tls, terminated=tls_terminated or tls.terminated)
    return replace(settings, allow_faults=allow_faults or settings.allow_faults, tls=tls)


def settings_with(database: str | None) -> Settings:
    """Settings from the environment, except for the database if one is given. Raises InvalidSetting,
    InvalidDatabaseUrl."""
    from manta.service.store.location import parse_url, url_in

    settings = Settings.from_environment()
    settings = replace(settings, database_url=database or settings.database_url)
    parse_url(url_in(settings.home, settings.database_url))
    return settings


@app.command()
def down(database: Database = None, as_json: Json = False) -> None:
    """Stop the service and everything it runs, and list what was running."""
    from manta.service.store.location import parse_url, shown, url_in

    settings = settings_with(database)
    home, looked_at = settings.home, shown(parse_url(url_in(settings.home, settings.database_url)))
    used = (running_service(home) or {}).get("database", looked_at)
    own_ray = RayHead(home).exists()
    stopped = stop_service(home)
    jobs = running_jobs(home, settings.database_url) if used == looked_at else []
    if as_json:
        ran = [
            {"id": job.id, "name": job.name, "state": job.state, "step": job.step, "checkpoint_step": saved}
            for job, saved in jobs
        ]
        typer.echo(json.dumps({"home": str(home), "database": used, "stopped": stopped, "jobs": ran}))
        return
    if not stopped:
        typer.echo(f"No service is running with home {home}.")
        return
    typer.echo("Manta is down.")
    if used != looked_at:
        typer.echo(f"Its jobs are in its database, {used}: `manta up --database URL` continues them.")
    for job, saved in jobs:
        typer.echo(f"  {job.id} ({job.name}) {_describe_consequences(job, saved, own_ray)}")
    if jobs:
        typer.echo("`manta up` continues them. To end a job instead, run `manta cancel JOB` after it.")


def _describe_consequences(job: Job, saved: int | None, own_ray: bool) -> str:
    """`saved`: step of the job's newest checkpoint, if it has one."""
    if not own_ray and job.state not in (JobState.QUEUED, JobState.PAUSED):
        return f"keeps running on the existing Ray cluster, at step {job.step} or later"
    from_where = (
        "from the beginning, since it has no checkpoint" if saved is None else f"from its checkpoint of step {saved}"
    )
    if job.state == JobState.QUEUED:
        return f"waits in the queue, and continues {from_where}" if job.step else "waits in the queue"
    if job.state == JobState.PAUSED:
        return f"stays paused at step {job.step} of {job.steps}; if resumed, it continues {from_where}"
    return f"was stopped at step {job.step} of {job.steps}, and continues {from_where}"


def running_jobs(home: Path, database: str | None = None) -> list[tuple[Job, int | None]]:
    """Unfinished jobs in the database of `home`, each with the step of its newest checkpoint, whether or not a service
    is running; none if it cannot be read."""
    from sqlalchemy.exc import SQLAlchemyError

    from manta.service.store import Store
    from manta.service.store.checkpoints import newest
    from manta.service.store.jobs import unfinished_summaries
    from manta.service.store.location import file_of, parse_url, url_in

    file = file_of(parse_url(url_in(home, database)))
    if file is not None and not file.exists():
        return []
    store = Store(url_in(home, database))
    try:
        with store.read() as session:  # it may be from another release
            saved = [(job, newest(session, job.id)) for job in unfinished_summaries(session)]
            return [(job, None if checkpoint is None else checkpoint.step) for job, checkpoint in saved]
    except SQLAlchemyError:
        return []
    finally:
        store.close()


@app.command("serve")
def serve_in_foreground(
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    slots: Slots = None,
    ray: Ray = None,
    wait_for_ray: WaitForRay = False,
    allow_faults: AllowFaults = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_terminated: TlsTerminated = False,
    database: Database = None,
) -> None:
    """Run the service in the foreground, for containers."""
    from manta.api import server

    server.configure_logging()
    settings = _with_options(settings_with(database), allow_faults, tls_cert, tls_key, tls_terminated)
    if ray is None:
        server.serve(settings, host, port, slots, None)
    else:
        restart_when_ended_by_ray(
            lambda again: server.serve(settings, host, port, slots, ray, wait_for_ray=again or wait_for_ray),
            settings.service_file,
        )


def start_service(settings: Settings, host: str, port: int, slots: int | None, ray: str | None) -> str:
    """Start the service in the background and return its address once it is ready. Raises HomeUnusable and NotStarted;
    in these cases a Ray that was already running keeps running, with its jobs."""
    from manta.api.server import serve_command

    home = settings.home
    ray_ran = RayHead(home).record() is not None
    log = home / "logs" / "service.log"
    with writing_in(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.parent.mkdir(mode=0o700, exist_ok=True)
        output = open(log, "ab", opener=_private)  # noqa: SIM115 - closed below, once the service has it
    began = log.stat().st_size
    with output:
        process = subprocess.Popen(
            serve_command(settings, host, port, slots, ray),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=settings.environment_of_service(),
            start_new_session=True,
        )
    try:
        return _wait_until_ready(home, process, log, began)
    except BaseException:  # interrupted, or too slow: leave no process behind
        if process.poll() is None:
            process.kill()
            process.wait()
            if not ray_ran:
                stop_service(home)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _wait_until_ready(home: Path, process: subprocess.Popen[bytes], log: Path, began: int) -> str:
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline:
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            running = running_service(home)
            if running is not None and _is_ready(home):
                return str(running["url"])
            continue
        raise NotStarted(f"the service did not start: {_last_error_of(process.returncode, log, began)} (log: {log})")
    raise NotStarted(f"the service is not ready after {UP_SECONDS:.0f} s; see its log: {log}")


def _last_error_of(status: int, log: Path, began: int) -> str:
    """The sentence that a service prints last when it refuses to start. What others print, such as the frames of a
    stack, is none."""
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").strip().splitlines()
    if status == EXIT_BAD_INPUT and lines:
        return lines[-1]
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"its process ended {how}" + ("; the end of its log may say why" if lines else " and printed nothing")


def _is_ready(home: Path) -> bool:
    try:
        with Client.of_home(home) as client:
            return bool(client.ready())
    except (ServiceUnreachable, ApiError):
        return False


def stop_service(home: Path) -> bool:
    """End the service of `home`, its Ray, and all processes and shared memory of its jobs. False: no service was
    running."""
    paths, head = Paths.of(home), RayHead(home)
    has_own_ray = head.exists()  # on an existing Ray cluster the jobs keep running and need these
    pid = service_process(home)
    if has_own_ray:
        head.freeze_ranks()
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGTERM)
            if not wait_until_ended([process], DOWN_SECONDS):
                process.kill()
    end_raylet(paths)
    if has_own_ray:
        head.stop()
        paths.remove_snapshots()
        paths.remove_runtime_folder()
    return pid is not None or has_own_ray


def restart_when_ended_by_ray(run: Callable[[bool], None], service_file: Path) -> None:
    """Call `run` in a forked process, and again in another if that process ends unexpectedly while `service_file` shows
    that it is serving; the argument of `run` is whether it is a restart. This process ends with the status of the
    child; signals are forwarded to the child, which dies with this process. Call it before Ray is imported and before
    any threads start."""
    again = False
    while True:
        child = _fork()
        if child == 0:
            run(again)
            return
        status = os.waitpid(child, 0)[1]
        for each in FORWARDED:
            signal.signal(each, signal.SIG_DFL)
        if not (_ended_by_itself(status) and _is_recorded_service(child, service_file)):
            _end_as(status)
        log.error("Ray has terminated the service; it is restarted")
        time.sleep(RESTART_PAUSE_SECONDS)
        again = True


def _fork() -> int:
    """Like os.fork, but the parent then forwards signals to the child, and the child dies with the parent."""
    parent, parent_death = os.getpid(), ParentDeathSignal()
    with _deferred(FORWARDED):
        child = os.fork()
        if child != 0:
            for each in FORWARDED:
                signal.signal(each, lambda number, _: os.kill(child, number))
    if child == 0:
        parent_death.arm(parent)
    return child


@contextlib.contextmanager
def _deferred(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Defers signals until the end of the block, in whichever process runs then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _ended_by_itself(status: int) -> bool:
    return os.WTERMSIG(status) in ABORTS if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status) != 0


def _is_recorded_service(pid: int, service_file: Path) -> bool:
    """Whether `service_file` still names `pid`: a service that ends regularly removes its file."""
    try:
        return int(json.loads(read_own(service_file) or "")["pid"]) == pid
    except (OwnFileUnusable, ValueError, TypeError, KeyError):
        return False


def _end_as(status: int) -> None:
    """End this process with the exit `status` of another."""
    if not os.WIFSIGNALED(status):
        raise SystemExit(os.waitstatus_to_exitcode(status))
    ended_by = os.WTERMSIG(status)
    if ended_by != signal.SIGKILL:
        signal.signal(ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), ended_by)
    raise SystemExit(128 + ended_by)  # the first process of a container is not ended by its own signals
