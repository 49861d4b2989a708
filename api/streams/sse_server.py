"""Growing lists as `text/event-stream`: reads what is new, sends it, and waits for more until the job is final."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from manta.api.app_state import state_of
from manta.api.problems import DATABASE_ERRORS
from manta.api.security.access import begin_stream, is_still_authorized
from manta.api.streams.changes import Changes, Watched
from manta.api.threads import LongReads, long_reads_of
from manta.service.store.errors import JobNotFound

PRESENCE_SECONDS = 1.0
"""Maximum seconds until it is noticed that a client, or its key, is gone."""
KEEPALIVE_SECONDS = 15.0
AWAY_SECONDS = 5.0
"""Seconds after which a stream whose database did not answer queries it again by itself."""
MEDIA_TYPE = "text/event-stream"


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
        _events(request, poll, position, state_of(request.app).changes, watched, long_reads_of(request)),
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
