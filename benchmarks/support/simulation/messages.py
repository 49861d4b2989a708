"""What a control plane asks of a simulated cluster, over a socket: one JSON object a line.

A request is `{"id", "agent", "method", "arguments"}`; `agent` is the name of the agent that is asked, null for the
cluster itself. An answer is `{"id", "answer"}` or `{"id", "error": [kind, message]}`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from manta.workers.protocol.json_codec import JsonObject

LONGEST_LINE = 64 * 2**20


class Channel:
    """The asking end: many requests at a time over one connection."""

    def __init__(self, path: str, errors: dict[str, type[Exception]]):
        """`path`: of the socket; `errors`: what is raised for an error of each kind."""
        self._path, self._errors = path, errors
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._opening = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, agent: str | None, method: str, arguments: JsonObject) -> Any:
        """The answer as JSON. Raises what the other end has raised, where that has a kind of ours."""
        async with self._opening:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
                self._reading = asyncio.create_task(self._read(reader))
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "agent": agent, "method": method, "arguments": arguments}
        self._writer.write(json.dumps(request).encode() + b"\n")
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            document = json.loads(line)
            waiting = self._waiting.get(document["id"])
            if waiting is None or waiting.done():
                continue  # nothing waits any more
            if "error" in document:
                kind, message = document["error"]
                waiting.set_exception(self._errors.get(kind, RuntimeError)(message))
            else:
                waiting.set_result(document["answer"])


Answer = Callable[[str | None, str, JsonObject], Awaitable[Any]]


async def serve_requests(path: str, answer: Answer) -> asyncio.Server:
    """Have `answer` answer all that is asked at the socket `path`, each request for itself."""
    tasks: set[asyncio.Task[None]] = set()

    async def reply(request: JsonObject, writer: asyncio.StreamWriter) -> None:
        try:
            said = {"answer": await answer(request["agent"], request["method"], request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the caller gets it
            said = {"error": [type(error).__name__, str(error)]}
        if not writer.is_closing():
            writer.write(json.dumps({"id": request["id"], **said}).encode() + b"\n")

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: set[asyncio.Task[None]] = set()
        try:
            while line := await reader.readline():
                task = asyncio.create_task(reply(json.loads(line), writer))
                for known in (tasks, mine):
                    known.add(task)
                    task.add_done_callback(known.discard)
        except ConnectionError:
            pass
        finally:
            for task in mine:  # it was asked by a process that is gone
                task.cancel()
            writer.close()

    return await asyncio.start_unix_server(converse, path, limit=LONGEST_LINE)
