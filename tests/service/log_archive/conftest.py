"""Control planes that keep logs, agents that print, and an S3 server."""

import asyncio
import contextlib
import itertools

import pytest
from s3_fixtures import bucket, s3_server, wire, wired_bucket  # noqa: F401 - fixtures

from manta.service.leases.held import HeldLease
from manta.service.log_archive.archiver import LogArchiver
from manta.service.logs.pages import read_page
from manta.service.store import jobs
from manta.workers.paths import Paths
from manta.workers.protocol.reports import Printed
from manta.workers.rank.report_buffer import ReportBuffer


class SharedLeases:
    """Who owns which job, of all control planes."""

    def __init__(self):
        self.owners, self.epochs = {}, {}


class LeasesOfOne:
    """What one control plane knows of that."""

    def __init__(self, shared):
        self._shared, self._held, self.certain = shared, {}, True

    def of(self, name):
        return self._held.get(name)

    def claim(self, name):
        """Whoever had it before has lost it, and does not know that."""
        self._shared.owners[name] = self
        self._shared.epochs[name] = self._shared.epochs.get(name, 0) + 1
        self._held[name] = HeldLease(name, self._shared.epochs[name], self)
        return self._held[name]

    def release(self, name):
        del self._held[name], self._shared.owners[name]

    @contextlib.asynccontextmanager
    async def borrowed(self, name):
        if name in self._shared.owners:
            yield None
            return
        yield self.claim(name)
        self.release(name)


class Plane:
    """A control plane with a home of its own, as far as logs go."""

    def __init__(self, store, shared, home, place, runner):
        self.runner, self.home, self.leases = runner, home, LeasesOfOne(shared)
        self.archiver = LogArchiver(store, self.leases, Paths.of(home, logs=place))

    def take(self, job):
        """Look after the job, whoever did before."""
        self.spool = self.archiver.open(job, self.leases.claim(job))

    def keep(self):
        """What is new is kept, if the place answers."""
        self.runner.run(self.archiver.leave())

    def finish(self, job):
        """The job has ended, or waits."""
        self.runner.run(self.archiver.finish(job, self.spool))
        self.leases.release(job)

    def go_on(self, until):
        """Keep logs as long as it takes."""

        async def run():
            task = asyncio.create_task(self.archiver.run())
            async with asyncio.timeout(60):
                while not until():
                    await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.runner.run(run())

    def read(self, job, position=None, **options):
        """A page of the log."""
        return read_page(self.archiver.source(job), position or {}, **options)

    def texts(self, job, **options):
        """All lines, page by page."""
        texts, position = [], {}
        while True:
            page = self.read(job, position, **options)
            texts += [line.text for line in page.lines]
            if not page.more:
                return texts
            position = page.position

    def files(self, job):
        """Of the job, in the home."""
        return sorted(path.name for path in (self.home / "jobs" / job).rglob("rank-*"))


class Agent:
    """That of one rank."""

    def __init__(self, rank=0):
        self.rank, self._buffer, self._after = rank, ReportBuffer(), {}

    def prints(self, *texts, generation=1, at=None):
        """One report."""
        self._buffer.add(Printed("stdout", texts), generation, self.rank, at)

    def tells(self, plane, *texts, keep=False, **options):
        """One report that the control plane fetches at once and, where asked to, keeps."""
        self.prints(*texts, **options)
        self.reports_to(plane)
        if keep:
            plane.keep()

    def reports_to(self, plane):
        """The control plane fetches what it has not seen; one that has just taken the job over all that there is."""

        async def fetch():
            after = self._after.get(plane.spool, 0)
            while True:
                kept = (self.rank, *plane.spool.mark(self.rank))
                reports = await self._buffer.read(after, 0.0, kept)
                if not reports:
                    break
                for report in reports:
                    await plane.spool.lines.take(report, report.payload)
                    after = report.sequence
            self._after[plane.spool] = after

        plane.runner.run(fetch())


@pytest.fixture
def job(store, submit):
    """A job's id."""
    return submit().id


@pytest.fixture
def to_state(store, job):
    """Moves the job there."""
    return lambda *states: [store.write(lambda session, to=to: jobs.transition(session, job, to)) for to in states]


@pytest.fixture
def make_plane(store, tmp_path):
    """Makes control planes of one installation."""
    shared, count = SharedLeases(), itertools.count()
    with asyncio.Runner() as runner:
        yield lambda place, home=None: Plane(store, shared, home or tmp_path / f"home-{next(count)}", place, runner)
