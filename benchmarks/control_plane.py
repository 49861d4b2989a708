"""What a control plane promises, tried on simulated ranks, and what it costs.

`kills`: jobs are driven to their ends while the control plane is killed with -9 at random moments, its start included,
and started again. No job may be lost, stuck, or trained by two gangs at a time; and as no rank ever dies, no step may
be trained twice. With `--control-planes 2` as many share the jobs, on PostgreSQL, and one of them is killed every ten
seconds; the others take over what it had, and how long that takes is measured. `steady`: what a control plane spends on
one running job, by the number of its ranks. The ranks are simulated in another process; everything from the supervisor
to the database is what runs in production.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import random
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.simulation.processes import ClusterProcess, ControlPlaneProcess, simulated_installation
from manta.service.states import SUPERVISED, JobState, is_final
from manta.service.store import Store, jobs, leases
from manta.service.store.installation_tables import ControlPlaneRow
from manta.service.store.location import sqlite_url
from manta.workers.errors import MantaError
from manta.workers.spec.reading import parse_job_spec
from tests.service.support.postgresql_server import NOT_FOUND, PostgresServer, programs

NODES, SLOTS = 8, 16
MIN_STEPS = 4
LAYOUTS = ({"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2, "data": 2})
MAX_SECONDS_ALIVE = 3.0
"""Until a control plane is killed, from its start: some do not live to be ready."""
STUCK_SECONDS = 120.0
"""All jobs together have stood still for that long after the last kill: something is stuck."""
SMALL = {"tensor": 2, "pipeline": 2, "data": 2}
LARGE = {"tensor": 8, "pipeline": 8, "data": 48}
LARGE_NODES = 3, 1024
"""How many, and the slots of each."""
SETTLE_SECONDS = 10.0
STEADY_TARGET = 1.2
POLL_SECONDS = 0.5
KILL_SECONDS = 10.0
"""Between two kills where several control planes share the jobs."""
TAKE_OVER_TARGET = 10.0
TAKE_OVER_POLL_SECONDS = 0.1


class Stuck(MantaError):
    """A job does not go on."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("control_plane", __doc__)
    options.add_argument("--jobs", type=int, default=300, help="jobs that are driven to their ends (default: 300)")
    options.add_argument(
        "--steps", type=int, default=120, help="most steps of a job, half a second each (default: 120)"
    )
    options.add_argument("--kills", type=int, default=100, help="kills of the control plane (default: 100)")
    options.add_argument("--control-planes", type=int, default=1, help="that share the jobs (default: 1)")
    options.add_argument("--database", choices=["sqlite", "postgresql"], help="default: what --control-planes needs")
    options.add_argument("--steady-seconds", type=float, default=60.0, help="measured in steady state; 0: not at all")
    parsed = options.parse_args(arguments)
    parsed.database = parsed.database or ("sqlite" if parsed.control_planes == 1 else "postgresql")
    if parsed.database == "sqlite" and parsed.control_planes > 1:
        options.error("only PostgreSQL has several control planes")
    return deliver(measure, parsed)


def _name(options: argparse.Namespace) -> str:
    """Of the report: each setup has results of its own."""
    if options.control_planes > 1:
        return "control_planes"
    return "control_plane" if options.database == "sqlite" else "control_plane_postgresql"


def measure(options: argparse.Namespace) -> Report:
    """Both, one after the other."""
    report = Report(_name(options), options.seed)
    report.settings = {"jobs": options.jobs, "steps": options.steps, "kills": options.kills, "slots": NODES * SLOTS}
    report.settings |= {"control_planes": options.control_planes, "database": options.database}
    if options.kills:
        (_kills if options.control_planes == 1 else _kills_of_several)(report, options)
    if options.steady_seconds:
        _steady(report, options.steady_seconds)
    return report


def _submit(store: Store, name: str, steps: int, layout: dict[str, int]) -> str:
    tensor, pipeline, data = (layout.get(axis, 1) for axis in ("tensor", "pipeline", "data"))
    spec = parse_job_spec(
        {
            "name": name,
            "model": {"layers": pipeline, "hidden_size": 8 * tensor, "heads": tensor, "sequence_length": 8},
            "data": {"source": "python-stdlib"},
            "train": {"steps": steps, "global_batch_size": data * pipeline, "micro_batch_size": 1},
            "parallel": layout,
            "checkpoint": {"every_steps": 0},
        }
    )
    return store.write(lambda session: jobs.create(session, spec))[0].id


@contextlib.contextmanager
def _database(kind: str, home: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if kind == "sqlite":
        yield sqlite_url(home / "manta.db")
        return
    installed = programs()
    if installed is None:
        raise MantaError(NOT_FOUND)
    server = PostgresServer(installed)
    try:
        yield server.url(server.make_empty())
    finally:
        server.close()


def _submit_all(store: Store, options: argparse.Namespace, draw: random.Random) -> dict[str, int]:
    """The jobs, and how many steps each has."""
    steps = {}
    for i in range(options.jobs):
        last = draw.randint(MIN_STEPS, options.steps)
        steps[_submit(store, f"job-{i}", last, draw.choice(LAYOUTS))] = last
    return steps


def _kills_of_several(report: Report, options: argparse.Namespace) -> None:
    """A control plane that was killed is never started again at the same place, where the next one would know that it
    is dead: others have to find out."""
    draw = random.Random(options.seed)
    with simulated_installation(NODES, SLOTS) as (home, cluster), _database(options.database, home) as url:
        store = Store(url)
        store.migrate()
        steps = _submit_all(store, options, draw)
        homes = (home.with_name(f"home-{i}") for i in range(options.control_planes + options.kills))
        planes = [_Plane(next(homes), cluster, url) for _ in range(options.control_planes)]
        seconds, beside_jobs = [], 0
        try:
            for plane in planes:
                plane.process.wait_until_ready()
            for _ in range(options.kills):
                time.sleep(KILL_SECONDS)
                beside_jobs += not all(is_final(state) for state in _states(store, steps).values())
                plane = planes.pop(draw.randrange(len(planes)))
                owner = plane.owner(store)
                plane.process.kill()
                seconds += _until_taken_over(store, owner)
                planes.append(_Plane(next(homes), cluster, url))
                planes[-1].process.wait_until_ready()
            _until_over(store, steps)
        finally:
            for plane in planes:
                plane.process.kill()
        account = _judge(report, store, steps, cluster)
        report.add("control_planes_that_had_jobs_left", beside_jobs, "of all kills")
        report.add("jobs_taken_over", len(seconds), "jobs")
        report.add("longest_without_an_owner", round(max(seconds, default=0.0), 2), "s", TAKE_OVER_TARGET)
        report.add("orders_that_agents_refused", account["refused"], "orders")
        store.close()


class _Plane:
    def __init__(self, home: Path, cluster: ClusterProcess, url: str):
        self.home, self.process = home, ControlPlaneProcess(home, cluster.socket, url)

    def owner(self, store: Store) -> str:
        """Id of the control plane."""
        with store.read() as session:
            rows = session.query(ControlPlaneRow).all()
        return next(row.id for row in rows if row.place.endswith(f":{self.home}"))


def _until_taken_over(store: Store, dead: str) -> list[float]:
    """Of each job that the dead control plane had, how long it took until another one had it, or it needed none. Raises
    Stuck."""
    began, taken, left = time.monotonic(), list[float](), None
    while left is None or left:
        with store.read() as session:
            supervised = {job.id: job for job in leases.overview(session) if job.state in SUPERVISED}
        waiting = {job for job, about in supervised.items() if about.owner in (dead, None)}
        if left is None:
            left = {job for job, about in supervised.items() if about.owner == dead}
        taken += [time.monotonic() - began] * len(left - waiting)
        left &= waiting
        if time.monotonic() - began > STUCK_SECONDS:
            raise Stuck(f"no control plane takes over {sorted(left)[:5]}")
        time.sleep(TAKE_OVER_POLL_SECONDS)
    return taken


def _kills(report: Report, options: argparse.Namespace) -> None:
    draw = random.Random(options.seed)
    with simulated_installation(NODES, SLOTS) as (home, cluster), _database(options.database, home) as url:
        store = Store(url)
        store.migrate()
        steps = _submit_all(store, options, draw)
        ready = beside_jobs = 0
        for _ in range(options.kills):
            beside_jobs += not all(is_final(state) for state in _states(store, steps).values())
            plane = ControlPlaneProcess(home, cluster.socket, url)
            time.sleep(draw.uniform(0.0, MAX_SECONDS_ALIVE))
            plane.kill()
            ready += bool(plane.process.stdout and plane.process.stdout.read())
        plane = ControlPlaneProcess(home, cluster.socket, url)
        try:
            plane.wait_until_ready()
            _until_over(store, steps)
        finally:
            plane.kill()
        _judge(report, store, steps, cluster)
        report.add("control_planes_that_were_ready_when_killed", ready, "of all kills")
        report.add("control_planes_that_had_jobs_left", beside_jobs, "of all kills")
        store.close()


def _states(store: Store, job_ids: Collection[str]) -> dict[str, JobState]:
    with store.read() as session:
        return jobs.states(session, job_ids)


def _progress(store: Store, job_ids: Collection[str]) -> dict[str, tuple[str, int]]:
    with store.read() as session:
        return {job: ((row := jobs.get(session, job)).state, row.step) for job in job_ids}


def _until_over(store: Store, job_ids: Collection[str]) -> None:
    """Raises Stuck."""
    last, since = _progress(store, job_ids), time.monotonic()
    while not all(is_final(state) for state, _ in last.values()):
        time.sleep(POLL_SECONDS)
        now = _progress(store, job_ids)
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > STUCK_SECONDS:
            left = collections.Counter(state for state, _ in last.values())
            raise Stuck(f"no job has moved for {STUCK_SECONDS:g} s: {dict(left)}")


def _judge(report: Report, store: Store, steps: dict[str, int], cluster: ClusterProcess) -> dict[str, Any]:
    states, account = _states(store, steps), cluster.account()
    trained = {job: [step for _, step in account["committed"].get(job, [])] for job in steps}
    report.add("jobs_that_did_not_succeed", sum(state != JobState.SUCCEEDED for state in states.values()), "jobs", 0)
    report.add(
        "jobs_that_miss_a_step", sum(set(trained[job]) != {*range(1, n + 1)} for job, n in steps.items()), "jobs", 0
    )
    report.add("steps_trained_twice", sum(len(each) - len(set(each)) for each in trained.values()), "steps", 0)
    report.add("gangs_that_trained_beside_another", len(account["problems"]), "gangs", 0)
    report.add("agents_and_places_left", len(account["held"]), "names", 0)
    report.samples["problems"] = account["problems"][:20]
    report.samples["states"] = [dict(collections.Counter(state.value for state in states.values()))]
    return account


def _steady(report: Report, seconds: float) -> None:
    """On one cluster of a few large nodes: what nodes cost is not a job's."""
    idle = _cost(None, seconds)
    report.add("cpu_without_a_job", round(idle, 4), "s a second")
    costs = []
    for layout in (SMALL, LARGE):
        costs.append(_cost(layout, seconds) - idle)
        report.add(f"cpu_of_a_job_of_{math.prod(layout.values())}_ranks", round(costs[-1], 4), "s a second")
    report.add("cpu_large_over_small", round(costs[1] / costs[0], 3), "ratio", STEADY_TARGET)


def _cost(layout: dict[str, int] | None, seconds: float) -> float:
    """CPU seconds that a control plane spends in one second with a running job, or none."""
    with simulated_installation(*LARGE_NODES) as (home, cluster):
        store = Store(f"sqlite:///{home / 'manta.db'}")
        store.migrate()
        job = None if layout is None else _submit(store, "steady", 1_000_000, layout)
        plane = ControlPlaneProcess(home, cluster.socket)
        try:
            plane.wait_until_ready()
            if job is not None:
                _until_running(store, job, home)
            time.sleep(SETTLE_SECONDS)
            process = psutil.Process(plane.process.pid)
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(seconds)
            return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
        finally:
            plane.kill()
            store.close()


def _until_running(store: Store, job: str, home: Path) -> None:
    deadline = time.monotonic() + STUCK_SECONDS
    while _progress(store, [job])[job][1] < 1:
        if time.monotonic() > deadline:
            raise Stuck(f"{job} does not start: {(home / 'plane.log').read_text()[-2000:]}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
