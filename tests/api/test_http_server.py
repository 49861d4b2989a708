"""A server that ends lets nobody wait for what is open."""

import httpx

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
