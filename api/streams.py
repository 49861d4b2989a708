"""Answers that go on: growing lists as `text/event-stream`, and requests that wait for a change of a job's state.

For any number of either, one query of the database every 0.2 seconds, on a thread of its own, is enough: a stream
without news costs neither a thread nor a query, and requests that wait hold none of the threads that other requests
need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from manta.api.app_state import state_of
from manta.api.problems import DATABASE_ERRORS
from manta.api.security.access import begin_stream, is_still_authorized
from manta.api.threads import LongReads, read_threads_of
from manta.service.logs.pages import JobLogs
from manta.service.states import is_final
from manta.service.store import Store, events, jobs
from manta.service.store.errors import JobNotFound

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MAX_WAIT_SECONDS = 60.0
"""Longer waits are refused; a client that wants to wait longer repeats its request."""
PRESENCE_SECONDS = 1.0
"""Maximum seconds until it is noticed that a client, or its key, is gone."""
KEEPALIVE_SECONDS = 15.0
AWAY_SECONDS = 5.0
"""Seconds after which a stream whose database did not answer queries it again by itself."""
MEDIA_TYPE = "text/event-stream"
StatesOf = Callable[[Collection[str]], Mapping[str, str]]
"""Returns the states of those of these jobs that exist. Runs in a thread, so it may block."""


@dataclass(frozen=True)
class Watched:
    """The subject of a stream."""

    job: str | None = None
    """Id of the job; None: all jobs."""
    logs: bool = False
    """Whether it follows the output of the job's ranks."""


VersionsOf = Callable[[Collection[Watched]], Mapping[Watched, object]]
"""Returns for each subject a value that changes whenever there is news; subjects that it leaves out are unknown. Runs
in a thread, so it may block."""


class Changes:
    """All streams of one app; used on one event loop."""

    def __init__(self, versions_of: VersionsOf):
        self._versions_of = versions_of
        self._streams: defaultdict[Watched, set[asyncio.Event]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-changes")
        self.is_closed = False
        """Whether streams should end because the service does; clients reconnect to the next one."""

    def close(self) -> None:
        """Have all streams end."""
        self.is_closed = True
        for streams in self._streams.values():
            for changed in streams:
                changed.set()

    @contextlib.contextmanager
    def of(self, watched: Watched) -> Iterator[asyncio.Event]:
        """An event that is set whenever there may be news."""
        changed = asyncio.Event()
        self._streams[watched].add(changed)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="changes")
        try:
            yield changed
        finally:
            self._streams[watched].discard(changed)
            if not self._streams[watched]:
                del self._streams[watched]

    async def _watch(self) -> None:
        """Runs until there are no more streams."""
        known: Mapping[Watched, object] = {}
        answers = True
        while self._streams:
            watched = list(self._streams)
            try:
                versions = await asyncio.get_running_loop().run_in_executor(self._thread, self._versions_of, watched)
            except Exception as error:  # it is queried again, and then everything may be new
                if answers:
                    why, is_ours = getattr(error, "orig", None) or error, not isinstance(error, SQLAlchemyError)
                    log.warning("cannot read updates for streams: %s", why, exc_info=is_ours)
                versions, answers = {}, False
            else:
                answers = True
                for each in watched:
                    if each not in versions or each not in known or versions[each] != known[each]:
                        for changed in self._streams.get(each, ()):
                            changed.set()
            known = versions
            await asyncio.sleep(POLL_SECONDS)


class StoredVersions:
    """Versions of the contents of database and logs."""

    def __init__(self, store: Callable[[], Store], logs: Callable[[], JobLogs]):
        """`store` and `logs`: the current ones; after a change of store, everything may be new."""
        self._store, self._logs = store, logs
        self._known: Store | None = None
        self._after = 0
        self._newest: dict[str, int] = {}

    def __call__(self, watched: Collection[Watched]) -> dict[Watched, object]:
        """See VersionsOf."""
        store = self._store()
        if store is not self._known:
            return self._begin(store)
        names = {each.job for each in watched if each.job is not None}
        with store.read() as session:
            self._newest |= events.newest_of_jobs(session, self._after)
            states = jobs.states(session, names)
        self._after = max([self._after, *self._newest.values()])
        self._newest = {job: self._newest[job] for job in names & self._newest.keys()}
        return {each: self._version(each, states) for each in watched}

    def _begin(self, store: Store) -> dict[Watched, object]:
        self._after, self._newest = store.query(events.newest), {}
        self._known = store
        return {}

    def _version(self, watched: Watched, states: Mapping[str, str]) -> object:
        if watched.job is None:
            return self._after
        if watched.logs:
            return self._logs().version(watched.job), states.get(watched.job)
        return self._newest.get(watched.job), states.get(watched.job)


@dataclass
class _Wait:
    """One waiting request."""

    job_id: str
    known: str
    """The state that should change."""
    over: asyncio.Future[None]

    def see(self, state: str | None) -> None:
        """The job is in `state`; None: it does not exist any more."""
        if state is None or state != self.known or is_final(state):
            self.end()

    def end(self, error: Exception | None = None) -> None:
        if self.over.done():  # its client may have disconnected
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class StateWaits:
    """All waiting requests of one app; used on one event loop."""

    def __init__(self, states_of: StatesOf):
        self._states_of = states_of
        self._waits: list[_Wait] = []
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-waits")

    def close(self) -> None:
        """End all waits, since the service ends."""
        self._is_closed = True
        for wait in self._waits:
            wait.end()

    async def until_changed(self, job_id: str, known: str | None, seconds: float) -> None:
        """Return when the job's state differs from `known` (None: from the present one), is final, or the job is gone,
        or after `seconds`. Raises the database's errors."""
        now = (await self._poll({job_id})).get(job_id)
        wait = _Wait(job_id, known or now or "", asyncio.get_running_loop().create_future())
        wait.see(now)
        if self._is_closed:
            wait.end()
        self._waits.append(wait)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="waits for states")
        try:
            async with asyncio.timeout(seconds):
                await wait.over
        except TimeoutError:
            return
        finally:
            self._waits.remove(wait)

    async def _watch(self) -> None:
        """Runs until there are no more waiting requests."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            asked = list(self._waits)
            if not asked:
                return
            try:
                states = await self._poll({wait.job_id for wait in asked})
            except Exception as error:  # noqa: BLE001 - each request answers with it, like at any other time
                for wait in asked:
                    wait.end(error)
                continue
            for wait in asked:
                wait.see(states.get(wait.job_id))

    async def _poll(self, job_ids: Collection[str]) -> Mapping[str, str]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._states_of, job_ids)


@dataclass(frozen=True)
class Entry:
    """One item of a stream."""

    id: str
    """Position after it: a client that reconnects with this as `Last-Event-ID` gets what follows."""
    data: str
    """The item as JSON."""


@dataclass(frozen=True)
class Batch:
    """Result of one query."""

    entries: list[Entry]
    """New items, in order."""
    position: object
    """Where the next query begins."""
    more: bool
    """Whether there is more that can be read at once."""
    final: bool
    """Whether the job was final before this query, so that nothing can follow."""
    state: str
    """The job's state."""


Poll = Callable[[object], Batch]
"""Reads what is new after a position. Runs in a worker thread, so it may block."""


def wants_stream(request: Request, follow: bool) -> bool:
    """Whether the client asks for a stream, by parameter or by its Accept header."""
    return follow or MEDIA_TYPE in request.headers.get("accept", "")


def stream(request: Request, poll: Poll, position: object, watched: Watched) -> StreamingResponse:
    """A response that sends everything after `position` and queries again whenever there is news about `watched`. It
    sends an `end` event after the job is final, and stops when the client, its key or the job is gone, or the service
    ends. It waits for a database that is away. Raises TooManyRequests."""
    begin_stream(request)
    return StreamingResponse(
        _events(request, poll, position, state_of(request.app).changes, watched, read_threads_of(request).long),
        media_type=MEDIA_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(
    request: Request, poll: Poll, position: object, changes: Changes, watched: Watched, threads: LongReads
) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    spoke_at = loop.time()
    yield KEEPALIVE_COMMENT  # tells the client at once that the stream is open
    with changes.of(watched) as changed:
        changed.set()
        while not (changes.is_closed or await request.is_disconnected()):
            if not await is_still_authorized(request):
                return
            if changed.is_set():
                changed.clear()
                try:
                    batch = await threads.run(partial(poll, position))
                except JobNotFound:  # the job was deleted meanwhile
                    return
                except DATABASE_ERRORS:  # `changes` notifies when it answers again, if it has noticed
                    loop.call_later(AWAY_SECONDS, changed.set)
                    continue
                position = batch.position
                for entry in batch.entries:
                    yield format_sse_event(data_str=entry.data, id=entry.id)
                    spoke_at = loop.time()
                if batch.final and not batch.more:
                    yield format_sse_event(event="end", data_str=f'{{"state": "{batch.state}"}}')
                    return
                if batch.more:
                    changed.set()
            if loop.time() - spoke_at > KEEPALIVE_SECONDS:
                yield KEEPALIVE_COMMENT
                spoke_at = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_SECONDS):
                    await changed.wait()
