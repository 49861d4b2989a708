"""Limits for each caller: requests per second, and requests and streams at once. Counted in memory, for this process
only."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from manta.service.errors import ErrorKind, ServiceError
from manta.service.settings import RequestLimits

_BURST_SECONDS = 2.0
_MAX_CALLERS = 10_000


class TooManyRequests(ServiceError):
    """A caller exceeds one of its limits; the message says which."""

    kind = ErrorKind("too_many_requests", 429, "the caller sends more requests than it may at once or in a second")

    def __init__(self, message: str, retry_seconds: float):
        self.retry_seconds = retry_seconds
        super().__init__(message)


@dataclass
class _Bucket:
    """The tokens that one caller has left."""

    tokens: float
    at: float


class TokenBuckets:
    """A bucket for each caller, filled with `rate` tokens per second up to two seconds' worth; a request takes one."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        """`rate` 0: no limit."""
        self._rate, self._size, self._clock = rate, max(1.0, rate * _BURST_SECONDS), clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, caller: str) -> float:
        """Take a token; returns 0 if there was one, otherwise the seconds until there is."""
        if self._rate == 0:
            return 0.0
        now = self._clock()
        bucket = self._buckets.setdefault(caller, _Bucket(self._size, now))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > _MAX_CALLERS:
            self._buckets.popitem(last=False)  # the oldest bucket is most likely full again
        bucket.tokens = min(self._size, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self._rate
        bucket.tokens -= 1
        return 0.0


class CallerLimits:
    """All limits of one service."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = time.monotonic):
        self._limits = limits
        self._of_keys = TokenBuckets(limits.requests_per_second, clock)
        self._of_addresses = TokenBuckets(limits.anonymous_per_second, clock)
        self._requests: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    def anonymous(self, address: str) -> None:
        """A request without a valid key came from `address`. Raises TooManyRequests."""
        wait = self._of_addresses.take(address)
        if wait:
            raise TooManyRequests("too many requests without a valid key from this address; wait, and send a key", wait)

    def begin_request(self, key_id: str) -> None:
        """A request with this key begins; `end_request` must follow. If it raises TooManyRequests, the request has not
        begun."""
        wait = self._of_keys.take(key_id)
        if wait:
            rate = self._limits.requests_per_second
            raise TooManyRequests(f"this key may send {rate:g} requests a second (MANTA_REQUESTS_PER_SECOND)", wait)
        most = self._limits.requests_at_once
        if self._requests[key_id] >= most:
            raise TooManyRequests(f"this key may have {most} requests open at once (MANTA_REQUESTS_AT_ONCE)", 1.0)
        self._requests[key_id] += 1

    def end_request(self, key_id: str) -> None:
        """A request that `begin_request` admitted was answered."""
        _less(self._requests, key_id)

    def begin_stream(self, key_id: str) -> None:
        """A request turns out to be a stream; `end_stream` must follow. If it raises TooManyRequests, the stream has
        not begun."""
        most = self._limits.streams_at_once
        if self._streams[key_id] >= most:
            raise TooManyRequests(f"this key may have {most} streams open at once (MANTA_STREAMS_AT_ONCE)", 1.0)
        self._streams[key_id] += 1

    def end_stream(self, key_id: str) -> None:
        """A stream that `begin_stream` admitted has ended."""
        _less(self._streams, key_id)


def _less(counts: Counter[str], key_id: str) -> None:
    counts[key_id] -= 1
    if counts[key_id] <= 0:
        del counts[key_id]
