"""What requests cost with a full database: 10,000 jobs, 10 million rows of metrics, and 8 clients at once.

The database is filled with SQL; a service without a cluster answers in a process of its own. Each kind of request is
set against what cannot be saved: a route that does nothing (`/healthz`), asked by as many clients in the same run, plus
the bare SQL that the answer needs. Live streams are opened while one job is read. `--database` names an empty
PostgreSQL database; without it the database is an SQLite file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
from sqlalchemy.orm import Session

from benchmarks.support.filled_database import DOCUMENT, Filled, fill
from benchmarks.support.report import ROOT, Report, deliver, parser, percentile
from manta.service.identity import Scope, digest_of, new_key
from manta.service.store import Store, keys
from manta.service.store.location import sqlite_url
from manta.workers.errors import MantaError

CLIENTS = 8
POINTS = 1000
MAX_SERIES = 10_000
READ_TARGET, LIST_TARGET, SERIES_TARGET, SUBMIT_TARGET = 2.0, 2.0, 5.0, 3.0
STREAMS_TARGET = 2.0
MEMORY_TARGET = 600.0
START_SECONDS = 60.0
ROUNDS = 4
BARE_TIMES = 10

Ask = Callable[[httpx.Client], None]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("api", __doc__)
    options.add_argument("--database", help="URL of an empty PostgreSQL database (default: an SQLite file)")
    options.add_argument("--jobs", type=int, default=10_000, help="jobs in the database (default: 10000)")
    options.add_argument("--points", type=int, default=10_000_000, help="rows of metrics (default: 10 million)")
    options.add_argument("--longest", type=int, default=1_000_000, help="of these of one job (default: a million)")
    options.add_argument("--seconds", type=float, default=8.0, help="for each kind of request (default: 8)")
    options.add_argument("--streams", type=int, default=500, help="live streams at once (default: 500)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Fill a database, and ask."""
    report = Report("api_postgresql" if options.database else "api", options.seed)
    report.settings = {
        "database": "postgresql" if options.database else "sqlite",
        "clients": CLIENTS,
        **{name: getattr(options, name) for name in ("jobs", "points", "longest", "seconds", "streams")},
    }
    with tempfile.TemporaryDirectory(prefix="manta-api-") as folder:
        home = Path(folder)
        url = options.database or sqlite_url(home / "manta.db")
        key = new_key()
        store = Store(url)
        store.migrate()
        began = time.monotonic()
        filled = fill(store, options.jobs, options.points, options.longest)
        report.add("filling", round(time.monotonic() - began, 1), "s")
        store.write(lambda session: keys.create(session, digest_of(key), "bench", Scope.ADMIN, installation=True))
        try:
            with _service(home, url) as (address, process):
                _ask_all(report, store, filled, address, key, options)
                _streams(report, filled, address, key, process, options)
        finally:
            store.close()
    return report


@contextlib.contextmanager
def _service(home: Path, url: str) -> Iterator[tuple[str, psutil.Process]]:
    """A service of its own process; its address."""
    command = [sys.executable, "-m", "benchmarks.support.api_process", str(home), url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _ask_all(report: Report, store: Store, filled: Filled, address: str, key: str, options: argparse.Namespace) -> None:
    # As `after_step` is another each time, so is the series: none of these is kept.
    series = [
        f"/v1/jobs/{filled.longest}/metrics?max_points={POINTS}&after_step={after}" for after in range(MAX_SERIES)
    ]
    # By LIMIT: asked to find the steps up to 1,000, PostgreSQL reads the whole table.
    first_thousand = f"SELECT * FROM metrics WHERE job_id = '{filled.longest}' ORDER BY step LIMIT {POINTS}"
    fifty = "SELECT * FROM jobs ORDER BY id DESC LIMIT 50"
    one = f"SELECT * FROM jobs WHERE id = '{filled.some}'"
    numbers = itertools.count()
    with _clients(address, key) as clients:
        pages, jobs = _pages_of_50(clients[0])
        # The service keeps what it has answered: each is asked for in turn, and the same again and again.
        kinds: dict[str, tuple[Ask, str | None, float]] = {
            "read_job": (_get(*jobs), one, READ_TARGET),
            "read_job_again": (_get(f"/v1/jobs/{filled.some}"), one, READ_TARGET),
            "list_50": (_get(*pages), fifty, LIST_TARGET),
            "list_50_again": (_get(pages[0]), fifty, LIST_TARGET),
            "series": (_get(*series), first_thousand, SERIES_TARGET),
            "series_again": (_get(series[0]), first_thousand, SERIES_TARGET),
            "submit": (_submit, None, SUBMIT_TARGET),
        }
        for name, (ask, statement, target) in kinds.items():
            ask(clients[0])  # once, so that what is made at the first time is there
            empty, alone, asked = list[float](), list[float](), list[float]()
            for _ in range(ROUNDS):  # in turn, so that what else the machine does is in all of them
                empty += _by_all(clients, _get("/healthz"), options.seconds / 2 / ROUNDS)
                alone += _submit_bare(store, numbers) if statement is None else _bare(store, statement)
                asked += _by_all(clients, ask, options.seconds / ROUNDS)
            bare = statistics.median(alone)
            spent, least = statistics.median(asked), statistics.median(empty) + bare
            report.add_spread(name, [seconds * 1000 for seconds in asked], "ms")
            report.add(f"{name}_empty_route", round(statistics.median(empty) * 1000, 3), "ms")
            report.add(f"{name}_bare_sql", round(bare * 1000, 3), "ms")
            report.add(f"{name}_multiple", round(spent / least, 2), "ratio", target)
            report.add(f"{name}_rate", round(len(asked) / options.seconds, 1), "a second")


@contextlib.contextmanager
def _clients(address: str, key: str) -> Iterator[list[httpx.Client]]:
    headers = {"Authorization": f"Bearer {key}"}
    with contextlib.ExitStack() as stack:
        made = [httpx.Client(base_url=address, headers=headers, timeout=60.0) for _ in range(CLIENTS)]
        yield [stack.enter_context(client) for client in made]


def _pages_of_50(client: httpx.Client) -> tuple[list[str], list[str]]:
    """The paths of all pages of the list of jobs, and of all jobs."""
    pages, jobs = ["/v1/jobs?limit=50"], list[str]()
    while True:
        page = client.get(pages[-1]).raise_for_status().json()
        jobs += [f"/v1/jobs/{job['id']}" for job in page["items"]]
        if page["next_cursor"] is None:
            return pages, jobs
        pages.append(f"/v1/jobs?limit=50&cursor={page['next_cursor']}")


def _get(*paths: str) -> Ask:
    """Asks for these in turn, whichever client it is."""
    turn = itertools.cycle(paths)

    def ask(client: httpx.Client) -> None:
        client.get(next(turn)).raise_for_status()

    return ask


def _submit(client: httpx.Client) -> None:
    client.post("/v1/jobs", json=DOCUMENT).raise_for_status()


def _by_all(clients: list[httpx.Client], ask: Ask, seconds: float) -> list[float]:
    """How long each request took, asked by all clients at once for some time."""

    def ask_on(client: httpx.Client) -> list[float]:
        spent, end = list[float](), time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            ask(client)
            spent.append(time.perf_counter() - began)
        return spent

    with ThreadPoolExecutor(len(clients)) as threads:
        return [each for some in threads.map(ask_on, clients) for each in some]


def _bare(store: Store, statement: str) -> list[float]:
    """Seconds of a statement and the fetching of its rows, by as many at once as there are clients."""

    def spent(_: int) -> list[float]:
        seconds = []
        with store.database.readers.connect() as connection:
            for _ in range(BARE_TIMES):
                began = time.perf_counter()
                connection.exec_driver_sql(statement).fetchall()
                seconds.append(time.perf_counter() - began)
        return seconds

    with ThreadPoolExecutor(CLIENTS) as threads:
        return [each for some in threads.map(spent, range(CLIENTS)) for each in some]


def _submit_bare(store: Store, numbers: Iterator[int]) -> list[float]:
    """Seconds of a transaction that stores a copy of a job's row, its state and its event, by as many at once as there
    are clients. `numbers`: of copies."""

    def spent(_: int) -> list[float]:
        seconds = []
        for number in itertools.islice(numbers, BARE_TIMES):
            began = time.perf_counter()
            store.write(partial(_copy, job=f"job_00b{number:09}"))  # below those that the service gives
            seconds.append(time.perf_counter() - began)
        return seconds

    with ThreadPoolExecutor(CLIENTS) as threads:
        return [each for some in threads.map(spent, range(CLIENTS)) for each in some]


def _copy(session: Session, job: str) -> None:
    for statement in _copies(job):
        session.connection().exec_driver_sql(statement)


def _copies(job: str) -> tuple[str, ...]:
    names = "state, name, spec, step, steps, generation, restarts, priority, metrics, report_cursor"
    times = "created_at, updated_at"
    newest = "(SELECT max(id) FROM jobs)"
    return (
        f"INSERT INTO jobs (id, {names}, {times}) SELECT '{job}', {names}, {times} FROM jobs WHERE id = {newest}",
        f"INSERT INTO state_changes (job_id, time, state) VALUES ('{job}', 0, 'QUEUED')",
        f"INSERT INTO events (job_id, time, type, message, data) VALUES ('{job}', 0, 'submitted', '', '{{}}')",
    )


def _streams(
    report: Report, filled: Filled, address: str, key: str, process: psutil.Process, options: argparse.Namespace
) -> None:
    """Live streams of jobs that run, while one job is read."""
    read = _get(f"/v1/jobs/{filled.some}")
    with _clients(address, key) as clients:
        before = percentile(_by_all(clients, read, options.seconds), 0.95)
        with _open_streams(address, key, filled.running, options.streams):
            beside = percentile(_by_all(clients, read, options.seconds), 0.95)
            memory = process.memory_info().rss / 1e6
    report.add("read_job_p95_without_streams", round(before * 1000, 3), "ms")
    report.add("read_job_p95_beside_streams", round(beside * 1000, 3), "ms")
    report.add("streams_multiple", round(beside / before, 2), "ratio", STREAMS_TARGET)
    report.add("memory_of_the_service", round(memory, 1), "MB", MEMORY_TARGET)


@contextlib.contextmanager
def _open_streams(address: str, key: str, running: list[str], count: int) -> Iterator[None]:
    """So many streams, all of which have sent something; they are read on threads of their own."""
    limits = httpx.Limits(max_connections=None)
    opened, over = threading.Semaphore(0), threading.Event()
    with httpx.Client(
        base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=60, limits=limits
    ) as client:

        def listen(number: int) -> None:
            path = f"/v1/jobs/{running[number % len(running)]}/events?follow=true"
            with client.stream("GET", path) as response:
                response.raise_for_status()
                next(response.iter_lines())
                opened.release()
                over.wait()

        threads = [threading.Thread(target=listen, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + START_SECONDS
        missing = sum(not opened.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in threads)
        try:
            if missing:
                raise MantaError(f"{missing} of {count} streams were not open after {START_SECONDS:g} s")
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    sys.exit(main())
