"""How a client that follows a job reads streams (`text/event-stream`, WHATWG HTML, section 9.2), and waits for a
service that does not answer for a while because it is being restarted or upgraded, or its database is away: meanwhile
the job continues to train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from manta.api.client.calls import resumed
from manta.api.client.rest_call import ApiError, Call, ServiceUnreachable

T = TypeVar("T")
GIVE_UP_SECONDS = 300.0
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 5.0
_PASSING = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream."""

    data: str
    """Content of the event."""
    event: str = "message"
    """Type of the event."""
    id: str = ""
    """Position after it, for `Last-Event-ID`."""


class EventParser:
    """Turns the lines of a stream into events. Feed it one line after the other, without their ends."""

    def __init__(self) -> None:
        """Starts before the first event."""
        self._fields: dict[str, list[str]] = {}

    def feed(self, line: str) -> ServerEvent | None:
        """The event that `line` completes, if it completes one."""
        if line == "":
            fields, self._fields = self._fields, {}
            if "data" not in fields:
                return None
            kind = fields.get("event", ["message"])[-1]
            return ServerEvent("\n".join(fields["data"]), kind, fields.get("id", [""])[-1])
        name, _, value = line.partition(":")
        if name:  # a line that begins with a colon is a comment
            self._fields.setdefault(name, []).append(value.removeprefix(" "))
        return None


class RetryPolicy:
    """Decides how long to wait before the service is called again, and when to give up."""

    def __init__(
        self,
        seconds: float = GIVE_UP_SECONDS,
        notify: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Gives up after `seconds` without an answer. `notify` is called once each time the service stops answering."""
        self._seconds, self._notify, self._clock = seconds, notify, clock
        self._lost_at: float | None = None
        self._pause = INITIAL_BACKOFF_SECONDS

    def answered(self) -> None:
        """The service has answered."""
        self._lost_at, self._pause = None, INITIAL_BACKOFF_SECONDS

    def pause_after(self, error: ApiError | ServiceUnreachable) -> float:
        """Seconds to wait after this answer, or lack of one. Raises `error` if another attempt is useless, or the
        service has not answered for too long."""
        if isinstance(error, ApiError) and error.problem.status not in _PASSING:
            raise error
        now = self._clock()
        if self._lost_at is None:
            self._lost_at = now
            self._notify(f"{error}; trying again")
        if now - self._lost_at >= self._seconds:
            raise error
        pause, self._pause = self._pause, min(2 * self._pause, MAX_BACKOFF_SECONDS)
        return pause

    def call(self, request: Callable[[], T]) -> T:
        """The result of `request`, called as often as necessary. Raises ApiError, ServiceUnreachable."""
        while True:
            try:
                answer = request()
            except (ApiError, ServiceUnreachable) as error:
                time.sleep(self.pause_after(error))
            else:
                self.answered()
                return answer


class FollowedStream(Generic[T]):
    """The position in a stream, so that it can be continued if it breaks off."""

    def __init__(self, call: Call[T]):
        self.call = call
        """What to send next."""
        self.ended = False
        """Whether the service has announced the end of the stream."""
        self._retries = RetryPolicy()
        self._has_begun = self._is_lost = False

    def begins(self) -> None:
        """The service has answered."""
        self._has_begun = True
        self._retries.answered()

    def take(self, event: ServerEvent) -> Iterator[T]:
        """The item in an event, if there is one."""
        self.ended = event.event == "end"
        if event.event == "message":
            self._is_lost = not event.id  # it would be unknown where to continue
            if event.id:
                self.call = resumed(self.call, event.id)
            yield self.call.answer.model_validate_json(event.data)

    def breaks_off(self, url: str) -> None:
        """The answer of the service at `url` has ended. Raises ServiceUnreachable if it should have continued."""
        if not self.ended:
            raise ServiceUnreachable(url, EOFError("the stream broke off"))

    def pause_after(self, error: ApiError | ServiceUnreachable) -> float:
        """Seconds until the stream is requested again. Raises `error` if that is useless."""
        if not self._has_begun or self._is_lost:
            raise error
        return self._retries.pause_after(error)
