"""Client and service of two releases that do not understand each other say so in a text."""

import asyncio

import httpx
import pytest

from manta.api import rest_version
from manta.api.client import ApiError, AsyncClient, Client, calls
from manta.api.rest_version import HEADER, REST, SUPPORTED_VERSIONS, client_incompatibility, service_incompatibility


def test_own_rest_version_or_none_at_all_is_accepted():
    assert REST in SUPPORTED_VERSIONS
    for version in (None, str(REST)):
        assert client_incompatibility(version) is None and service_incompatibility(version) is None


@pytest.mark.parametrize("version", ["0", "99", "", "nonsense", "1.0", " 1"])
def test_foreign_rest_version_is_refused_with_both_versions(version):
    for said in (client_incompatibility(version), service_incompatibility(version)):
        assert f"speaks version {version} of Manta's REST API" in said and f" {REST}: use a client of the" in said
        assert len(said) < 300


def test_several_rest_versions_can_be_supported_at_once(monkeypatch):
    monkeypatch.setattr(rest_version, "SUPPORTED_VERSIONS", (1, 2))
    assert client_incompatibility("2") is None
    assert "this service 1 and 2: " in client_incompatibility("3")


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/readyz"])
def test_every_answer_of_the_service_says_its_version(service, path):
    assert httpx.get(service.url + path).headers[HEADER] == str(REST)
    assert httpx.get(service.url + "/nowhere").headers[HEADER] == str(REST)


def test_service_refuses_a_client_of_a_newer_rest_version_before_any_change(service, document):
    response = service.http.post("/v1/jobs", json=document, headers={HEADER: "99"})
    assert (response.status_code, response.json()["code"]) == (400, "other_release")
    assert response.json()["detail"].startswith("the client speaks version 99 of Manta's REST API and this service 1: ")
    with Client(service.url) as client:
        assert client.jobs().items == []


def newer_service(request):
    assert request.headers[HEADER] == str(REST)
    return httpx.Response(200, json={"whatever": 1}, headers={HEADER: "2"})


def test_client_refuses_a_service_of_a_newer_rest_version():
    client = Client("http://elsewhere", httpx.MockTransport(newer_service))
    text = "the service speaks version 2 of Manta's REST API and this client 1: use a client of the service's release"
    for ask in (client.jobs, lambda: next(client.follow_all_events())):
        with pytest.raises(ApiError) as caught:
            ask()
        assert (str(caught.value), caught.value.problem.code) == (text, "other_release")

    async def ask_async():
        async with AsyncClient("http://elsewhere", httpx.MockTransport(newer_service)) as client:
            with pytest.raises(ApiError, match="speaks version 2"):
                await client.send(calls.cluster())
            with pytest.raises(ApiError, match="speaks version 2"):
                async for _ in client.stream(calls.follow_all_events()):
                    pass

    asyncio.run(ask_async())
