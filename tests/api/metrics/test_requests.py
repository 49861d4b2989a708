"""How long requests took is measured under labels of which there are few, whatever is sent."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from manta.api.metrics.requests import RequestTimer


class Route:
    """Of a resource."""

    path = "/v1/jobs/{job_id}"


def measured(scope, status=None):
    """The labels under which a request was measured that was answered with `status`; None: it failed."""
    registry = CollectorRegistry()

    async def app(scope, receive, send):
        if status is None:
            raise RuntimeError
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    async def main():
        sent = []

        async def send(message):
            sent.append(message["type"])

        try:
            await RequestTimer(app, registry)(scope, None, send)
        except RuntimeError:
            sent.append("failed")
        return sent

    sent = asyncio.run(main())
    counts = [sample for metric in registry.collect() for sample in metric.samples if sample.name.endswith("_count")]
    assert all(sample.value == 1 for sample in counts)
    return sent, [sample.labels for sample in counts]


@pytest.mark.parametrize(
    ("method", "route", "status", "labels"),
    [
        ("GET", Route, 200, {"method": "GET", "route": "/v1/jobs/{job_id}", "status": "200"}),
        ("DELETE", Route, 404, {"method": "DELETE", "route": "/v1/jobs/{job_id}", "status": "404"}),
        ("GET", None, 404, {"method": "GET", "route": "unmatched", "status": "404"}),
        ("BREW", None, 405, {"method": "other", "route": "unmatched", "status": "405"}),
    ],
)
def test_request_is_measured_by_method_route_and_status(method, route, status, labels):
    scope = {"type": "http", "method": method, "path": "/v1/jobs/job_1", **({} if route is None else {"route": route})}
    assert measured(scope, status) == (["http.response.start", "http.response.body"], [labels])


def test_request_on_which_the_service_failed_is_one_of_its_errors():
    sent, (labels,) = measured({"type": "http", "method": "GET", "path": "/", "route": Route})
    assert (sent, labels["status"]) == (["failed"], "500")


def test_websocket_connections_are_not_counted_as_requests():
    assert measured({"type": "websocket", "path": "/"}, 200)[1] == []
