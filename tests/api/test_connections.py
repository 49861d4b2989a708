"""Connections are limited, and end in order with the server."""

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from manta.api.rest_version import HEADER, REST
from manta.api.security import request_guard
from manta.api.security.rate_limits import CallerLimits
from manta.api.serving import connections
from manta.api.serving.connections import MAX_CONNECTIONS, LimitedConnection, is_no_hangup, max_connections
from manta.service.store import events
from tests.api.conftest import FakeControl, add_admin, serving
from tests.api.support.keys import ADMIN, bearer
from tests.service.support.virtual_time import run_with_answers_at_once

SECONDS = 20.0
HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def impatient(monkeypatch):
    """A server that waits but a moment for the head of a request."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with serving(FakeControl()) as url:
        yield httpx.URL(url)


def connected(url):
    made = socket.create_connection((url.host, url.port), timeout=SECONDS)
    made.settimeout(SECONDS)
    return made


def answer(connection):
    """All that is sent until the connection is closed."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("said", [b"", b"GET ", HEAD], ids=["nothing", "a word", "half a head"])
def test_connection_without_a_complete_head_is_closed_without_an_answer(impatient, said):
    with connected(impatient) as connection:
        connection.sendall(said)
        assert answer(connection) == b""


def test_slow_request_head_does_not_extend_its_time_limit(impatient):
    with connected(impatient) as connection:
        connection.settimeout(0.02)
        connection.sendall(HEAD + b"X-Long: ")
        for _ in range(400):
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(ConnectionError):  # closed, and then sent to
                    connection.sendall(b"a")
                    assert connection.recv(1) == b""
                return
    pytest.fail("it is waited for again with each byte")


def test_second_request_head_of_a_connection_has_the_same_time_limit(service, monkeypatch):
    with connected(httpx.URL(service.url)) as connection:
        connection.sendall(HEAD + b"\r\n")
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 200 OK")
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
        connection.sendall(b"GET ")
        assert answer(connection) == b""


class Wire(asyncio.Transport):
    """The service's end of a connection, on a clock of the test's own."""

    def __init__(self):
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass


async def echo(scope, receive, send):
    """Answers with what it is sent."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def test_slow_request_body_is_not_cut_off_by_the_head_limit():
    async def main():
        config, wire = uvicorn.Config(echo, log_config=None, lifespan="off"), Wire()
        connection = connections.LimitedConnection(config, ServerState(), {})
        connection.connection_made(wire)
        connection.data_received(HEAD.replace(b"GET", b"POST") + b"Content-Length: 2\r\n\r\n{")
        await asyncio.sleep(10 * connections.HEAD_SECONDS)
        assert (wire.sent, wire.closed) == (b"", False)
        connection.data_received(b"}")
        await asyncio.sleep(1)
        assert wire.sent.startswith(b"HTTP/1.1 200 OK") and wire.sent.endswith(b"\r\n\r\n{}")
        connection.connection_lost(None)

    run_with_answers_at_once(main())


def said_by_the_service(*pieces):
    """Its answer to what a connection sends while no request is answered, and how many of the pieces it takes."""

    async def main():
        config, wire = uvicorn.Config(echo, log_config=None, lifespan="off"), Wire()
        connection = connections.LimitedConnection(config, ServerState(), {})
        connection.connection_made(wire)
        taken = 0
        while taken < len(pieces) and not wire.closed:
            connection.data_received(pieces[taken])
            taken += 1
        said = wire.sent, taken, wire.closed
        connection.connection_lost(None)  # which closes it, too
        return said

    return run_with_answers_at_once(main())


CHUNKED = HEAD.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [100, 1000, 250_000])
@pytest.mark.parametrize(
    ("begin", "without_end"),
    [(b"GET /?q=", b"a"), (HEAD + b"X-Long: ", b"a"), (HEAD, b"x"), (HEAD, b"A: b\r\n"),
     (CHUNKED + b"1;", b"a"), (CHUNKED + b"1;a=", b"a"), (CHUNKED + b"0\r\nX-Long: ", b"a"),
     (CHUNKED + b"0\r\n", b"A: b\r\n"), (CHUNKED + b"1\r\na\r\n2;", b"a")],
    ids=["address", "header", "header's name", "headers", "chunk's extension", "its value", "trailer",
         "trailers", "a later chunk's extension"],
)  # fmt: skip
def test_endless_request_head_or_trailer_is_refused_and_the_connection_closed(begin, without_end, size):
    piece = (without_end * size)[:size]
    most = connections.MAX_HEAD_BYTES // size + 2
    said, taken, closed = said_by_the_service(begin, *[piece] * (2 * most))
    assert closed and taken <= most
    assert said.startswith(b"HTTP/1.1 431 ") and b'"head_too_large"' in said
    assert b"application/problem+json" in said and f"{HEADER}: {REST}".lower().encode() in said.lower()


@pytest.mark.parametrize("long", [b"A: b\r\n" * 201, b"A: " + b"b" * 65536 + b"\r\n"], ids=["lines", "bytes"])
def test_oversized_request_head_in_one_piece_is_refused(long):
    said, _, closed = said_by_the_service(HEAD + long + b"\r\n")
    assert closed and said.startswith(b"HTTP/1.1 431 ")
    assert b'"head_too_large"' in said


def test_non_http_bytes_are_answered_with_a_problem_document():
    said, _, closed = said_by_the_service(b"\x16\x03\x01\x02\x00\x01\x00")
    assert closed and said.startswith(b"HTTP/1.1 400 ") and b'"http_error"' in said


@pytest.mark.parametrize(
    "more", [HEAD + b"\r\n", b"\x16\x03", HEAD + b"A: b\r\n" * 201], ids=["whole", "none", "large"]
)
def test_endless_pipelined_requests_close_the_connection_without_an_answer(more):
    said, taken, closed = said_by_the_service(HEAD + b"\r\n", *[more] * 100)
    assert closed and taken <= connections.MAX_PIPELINED + 2
    assert said == b"", "it would be taken for the answer to the first"


@pytest.mark.parametrize("large", [b"A: b\r\n" * 199, b"A: " + b"b" * 65_000 + b"\r\n"], ids=["lines", "bytes"])
def test_request_head_of_the_largest_size_is_answered(service, large):
    with connected(httpx.URL(service.url)) as connection:
        connection.sendall(HEAD + large + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_request_body_in_tiny_chunks_does_not_count_as_head():
    said, _, closed = said_by_the_service(CHUNKED, *[b"1\r\na\r\n"] * 20_000)
    assert not closed and said == b""


def test_request_without_a_route_is_answered_before_its_body_arrives(service):
    """It would be kept in memory, and nobody else would get a connection any more."""
    with connected(httpx.URL(service.url)) as stranger:
        stranger.sendall(HEAD.replace(b"GET", b"POST") + b"Connection: close\r\nContent-Length: 1000000\r\n\r\n{")
        assert answer(stranger).startswith(b"HTTP/1.1 405 Method Not Allowed")


def test_request_body_that_never_arrives_times_out(service, monkeypatch):
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\n".encode()
    monkeypatch.setattr(request_guard, "BODY_SECONDS", 0.2)
    with connected(httpx.URL(service.url)) as slow:
        slow.sendall(head + b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: 10\r\n\r\n{")
        said = answer(slow)
    assert said.startswith(b"HTTP/1.1 408 Request Timeout") and b"body_too_slow" in said


def test_unread_event_stream_is_closed_and_frees_its_place(service, monkeypatch):
    """It would not even notice that its key was revoked."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    ended, end = threading.Event(), CallerLimits.end_stream

    def noted(limits, key_id):
        end(limits, key_id)
        ended.set()

    monkeypatch.setattr(CallerLimits, "end_stream", noted)
    with long_stream(service):
        assert ended.wait(SECONDS)


def test_stream_that_is_read_again_stays_open(service, monkeypatch):
    paused, left = threading.Event(), []
    pause, resume = LimitedConnection.pause_writing, LimitedConnection.resume_writing
    monkeypatch.setattr(LimitedConnection, "pause_writing", lambda self: (pause(self), paused.set()))
    monkeypatch.setattr(
        LimitedConnection, "resume_writing", lambda self: (resume(self), left.append(self._unread_timer))
    )
    with long_stream(service) as stream:
        assert paused.wait(SECONDS)
        while not left:
            assert stream.recv(2**20)
    assert left[0] is None, "nothing waits to end it"


@contextlib.contextmanager
def long_stream(service):
    """A connection to which much more is sent than it holds."""
    job = service.submit()["id"]

    def say_much(session):
        for _ in range(120):
            events.append(session, job, "told", "x" * 100_000)

    service.store.write(say_much)
    with connected(httpx.URL(service.url)) as stream:
        head = f"GET /v1/jobs/{job}/events?follow=true HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\n"
        stream.sendall(f"{head}\r\n".encode())
        yield stream


def test_connection_beyond_the_limit_is_refused_until_another_closes():
    with serving(FakeControl(), most=2) as url:
        address = httpx.URL(url)
        with connected(address) as first, connected(address) as second:
            for each in (first, second):
                each.sendall(HEAD + b"\r\n")
                received = b""
                while not received.endswith(b'{"status":"ok"}'):
                    received += each.recv(65536)
                assert received.startswith(b"HTTP/1.1 200 OK")
            refused = httpx.get(f"{url}/healthz", timeout=SECONDS)
            assert (refused.status_code, refused.json()["code"]) == (503, "too_many_connections")
            assert refused.headers["Retry-After"] == "5"
            assert refused.headers[HEADER] == str(REST)
            assert refused.headers["Content-Type"] == "application/problem+json"
            first.sendall(HEAD + b"Connection: close\r\n\r\n")
            assert answer(first).startswith(b"HTTP/1.1 200 OK")
        assert httpx.get(f"{url}/healthz", timeout=SECONDS).status_code == 200


@pytest.mark.parametrize(("soft", "hard", "raised", "most"), [
    (1024, 100_000, MAX_CONNECTIONS + 256, MAX_CONNECTIONS),
    (1024, 4096, 4096, 4096 - 256),
    (1024, resource.RLIM_INFINITY, MAX_CONNECTIONS + 256, MAX_CONNECTIONS),
    (100_000, 100_000, None, MAX_CONNECTIONS),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, MAX_CONNECTIONS),
    (100, 100, None, 1),
])  # fmt: skip
def test_connection_limit_leaves_open_files_for_the_rest_of_the_service(monkeypatch, soft, hard, raised, most):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert max_connections() == most
    assert asked == ([] if raised is None else [(raised, hard)])


def test_open_stream_ends_in_order_with_the_server(store, tmp_path):
    add_admin(store)
    with httpx.Client(timeout=20, headers=bearer(ADMIN)) as client:
        with serving(FakeControl(store, tmp_path)) as url:
            stream = client.send(client.build_request("GET", f"{url}/v1/events?follow=true"), stream=True)
            lines = stream.iter_lines()
            assert next(lines) == ": ping"
        assert not any(lines), "it is over, and nothing was broken off"


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"), False),
        (RuntimeError("a defect"), True),
        (OSError("the handler is closed"), True),
        (None, True),
    ],
)
def test_client_resets_are_not_logged_as_service_errors(error, logged):
    about = None if error is None else (type(error), error, None)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in ASGI application", (), about)
    assert is_no_hangup(record) == logged


@pytest.mark.parametrize(("peer", "shown"), [("::ffff:192.0.2.1", "192.0.2.1"), ("2001:db8::1", "2001:db8::1")])
def test_caller_over_ipv4_of_a_listener_for_both_families_is_known_by_its_address(peer, shown):
    async def client():
        config = uvicorn.Config(FakeControl(), log_config=None)
        config.load()
        connection = LimitedConnection(config, ServerState(), {}, asyncio.get_running_loop())
        end = Mock(**{"getpeername.return_value": (peer, 7, 0, 0)})
        transport = Mock(**{"get_extra_info.side_effect": {"socket": end}.get})
        connection.connection_made(transport)
        return connection.client

    assert asyncio.run(client()) == (shown, 7)
