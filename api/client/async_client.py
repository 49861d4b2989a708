"""The Python client for event loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from manta.api.client import calls
from manta.api.client.rest_call import (
    STREAM_TIMEOUT,
    ApiError,
    Call,
    ServiceUnreachable,
    client_options,
    explaining_proxy_errors,
    raise_for_problem,
)
from manta.api.client.retries import EventParser, FollowedStream, ServerEvent
from manta.api.serving.local_service import find_url
from manta.service.ids import is_job_id
from manta.service.settings import Settings

T = TypeVar("T")


class AsyncClient:
    """Talks to a Manta service from an event loop: `await client.send(calls.job(job_id))`. A name that no other job has
    can be used instead of a job's id."""

    def __init__(
        self, url: str | None = None, transport: httpx.AsyncBaseTransport | None = None, key: str | None = None
    ):
        """`url`: of the service, by default the one that `find_url` returns. `key`: by default the one that `find_key`
        returns. `transport`: for tests. Raises KeyFileUnsafe."""
        settings = Settings.from_environment()
        self.url = (url or find_url(settings)).rstrip("/")
        with explaining_proxy_errors(self.url):
            options = client_options(settings, self.url, key, transport is not None)
            self._http = httpx.AsyncClient(transport=transport, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def id_of(self, job: str) -> str:
        """The id of a job, given by its id or by a name that no other job has. Raises ApiError, ServiceUnreachable."""
        return job if is_job_id(job) else calls.only_one(job, await self.send(calls.lookup(job)))

    async def _by_id(self, call: Call[T]) -> Call[T]:
        name = calls.name_in(call)
        return call if name is None else call.about(await self.id_of(name))

    async def send(self, call: Call[T]) -> T:
        """Send a call and read its answer. Raises ApiError, ServiceUnreachable."""
        call = await self._by_id(call)
        try:
            return call.read(await self._http.send(call.request(self._http)))
        except httpx.TransportError as error:
            raise ServiceUnreachable(self.url, error) from error

    async def stream(self, call: Call[T]) -> AsyncIterator[T]:
        """Send a call that answers with a stream, and yield its items until the job is final; see Client."""
        followed = FollowedStream(await self._by_id(call))
        while not followed.ended:
            try:
                async with contextlib.aclosing(self._events(followed)) as events:
                    async for event in events:
                        for item in followed.take(event):
                            yield item
            except (ApiError, ServiceUnreachable) as error:
                await asyncio.sleep(followed.pause_after(error))

    async def _events(self, followed: FollowedStream[Any]) -> AsyncGenerator[ServerEvent]:
        request = followed.call.request(self._http)
        request.extensions["timeout"] = STREAM_TIMEOUT.as_dict()
        try:
            response = await self._http.send(request, stream=True)
            try:
                if response.is_error:
                    await response.aread()
                raise_for_problem(response)
                followed.begins()
                parser = EventParser()
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                followed.breaks_off(self.url)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise ServiceUnreachable(self.url, error) from error
