"""What a job page knows, and how it keeps up: each poll fetches only what is new."""

from __future__ import annotations

from collections import deque

from api import calls
from api.client import AsyncMantaClient
from api.schemas import Checkpoint, Event, Job, Ledger, LogLine, MetricSeries, Rank, Recovery
from api.ui.charts import restart_steps
from service.states import is_final
from workers import metric_names

MAX_POINTS = 1000
"""Steps in a chart at first; up to twice as many before they are thinned out again."""
METRICS = ("loss", "validation_loss", "tokens_per_second", "mfu_full")
EVENTS_SHOWN = 200
LOG_LINES_SHOWN = 100
RECOVERIES_READ = 1000
RECOVERIES_SHOWN = 20
_OVERLAP = 8  # steps asked for again, since a step's validation loss may come after its other metrics
_ALL_POINTS = 10_000
_PAGE = 1000
_MOST_PAGES = 5  # of one stream in one poll; the next poll goes on
_SLOW_TURN = 3  # ranks and checkpoints are read every so many polls, and at once when an event comes


class Curves:
    """Metrics over steps, brought up to date by increments."""

    def __init__(self) -> None:
        self.points: dict[int, dict[str, float | None]] = {}
        self.last_step = 0

    def merge(self, newer: MetricSeries) -> bool:
        """Add `newer`; returns whether that changed anything."""
        changed = False
        for place, step in enumerate(newer.steps):
            values = {name: column[place] for name, column in newer.series.items()}
            known = self.points.get(step, {})
            merged = {**known, **{name: value for name, value in values.items() if value is not None}}
            if repr(merged) != repr(known):  # repr, since nan is not equal to itself
                self.points[step] = merged
                changed = True
            self.last_step = max(self.last_step, step)
        return changed


class LogTail:
    """The last lines that one rank, or all of them, printed."""

    def __init__(self, rank: int | None = None):
        """Of `rank`; None means all, merged by time."""
        self.rank = rank
        self.lines: deque[LogLine] = deque(maxlen=LOG_LINES_SHOWN)
        self.behind = True
        """Whether there is more to read right now."""
        self._cursor: str | None = None

    async def poll(self, client: AsyncMantaClient, job_id: str) -> None:
        """Read what was printed since."""
        for _ in range(_MOST_PAGES):
            page = await client.send(calls.logs(job_id, self.rank, self._cursor, _PAGE))
            self.lines.extend(page.items)
            self._cursor = page.resume_cursor
            self.behind = page.next_cursor is not None
            if not self.behind:
                return


class JobFeed:
    """Everything on a job's page. Counters say how often a part has changed, so that only that part is drawn anew."""

    def __init__(self, client: AsyncMantaClient, job_id: str):
        """Of the job `job_id`, read through `client`."""
        self.job_id = job_id
        self.job: Job | None = None
        self.curves = Curves()
        self.curves_version = 0
        self.events: deque[Event] = deque(maxlen=EVENTS_SHOWN)
        """Oldest first."""
        self.restarts: list[int] = []
        """Steps at which a recovery began."""
        self.ranks: list[Rank] = []
        self.checkpoints: list[Checkpoint] = []
        self.ledger: Ledger | None = None
        self.recoveries: list[Recovery] = []
        """The newest, newest first."""
        self.log = LogTail()
        self._client = client
        self._cursor: str | None = None
        self._events_behind = True
        self._turn = 0
        self._complete = False

    @property
    def done(self) -> bool:
        """Whether the job will never change again, and everything about it was read."""
        return self.job is not None and is_final(self.job.state) and self._complete

    @property
    def validation_sets(self) -> dict[str, str]:
        """The metrics of the job's validation sets, by the sets' names."""
        return metric_names.validation_losses(self.job.spec) if self.job is not None else {}

    @property
    def latest_event_id(self) -> str | None:
        """Id of the newest event."""
        return self.events[-1].id if self.events else None

    async def poll(self) -> None:
        """Read what is new. Raises ApiError, ServiceUnreachable; the next poll goes on where this one stopped."""
        job = await self._client.send(calls.job(self.job_id))  # first: what is read later is at least as new
        moved = self.job is None or (job.state, job.generation) != (self.job.state, self.job.generation)
        self._complete = False
        self.job = job
        await self._poll_curves(job)
        moved = await self._poll_events() or moved
        if moved or self._turn % _SLOW_TURN == 0:
            self.ranks = (await self._client.send(calls.ranks(self.job_id))).items
            self.checkpoints = (await self._client.send(calls.checkpoints(self.job_id))).items
            self.ledger = await self._client.send(calls.ledger(self.job_id))
            page = await self._client.send(calls.recoveries(self.job_id, RECOVERIES_READ))
            self.recoveries = page.items[: -RECOVERIES_SHOWN - 1 : -1]
        await self.log.poll(self._client, self.job_id)
        self._turn += 1
        self._complete = not (self._events_behind or self.log.behind)

    async def _poll_curves(self, job: Job) -> None:
        first = not self.curves.points or len(self.curves.points) > 2 * MAX_POINTS
        curves = Curves() if first else self.curves
        validation = ("validation_loss", *self.validation_sets.values())
        names = dict.fromkeys((*METRICS, *validation))
        after = max(0, curves.last_step - _OVERLAP)
        changed = curves.merge(await self._client.send(calls.metrics(self.job_id, tuple(names), after, MAX_POINTS)))
        if first and job.step > MAX_POINTS:  # thinned out by loss: validation, which is rare, is read in full
            points = await self._client.send(calls.metrics(self.job_id, validation, 0, _ALL_POINTS))
            rows = enumerate(zip(*points.series.values(), strict=True))
            known = [place for place, values in rows if any(value is not None for value in values)]
            rare = {name: [column[place] for place in known] for name, column in points.series.items()}
            curves.merge(MetricSeries(steps=[points.steps[place] for place in known], series=rare))
        self.curves = curves
        self.curves_version += int(changed)

    async def _poll_events(self) -> bool:
        new: list[Event] = []
        for _ in range(_MOST_PAGES):
            page = await self._client.send(calls.events(self.job_id, self._cursor, _PAGE))
            new += page.items
            self._cursor = page.resume_cursor
            self.events.extend(page.items)
            self._events_behind = page.next_cursor is not None
            if not self._events_behind:
                break
        self.restarts = sorted({*self.restarts, *restart_steps(new)})
        return bool(new)
