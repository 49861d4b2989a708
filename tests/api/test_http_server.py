"""A server that ends lets nobody wait for what is open."""

import logging

import httpx
import pytest

from manta.api.serving.connections import is_no_hangup
from tests.api.conftest import FakeControl, add_admin, serving
from tests.api.support.keys import ADMIN, bearer


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
