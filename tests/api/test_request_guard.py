"""What other sites make a browser send is refused, and so are bodies that no request needs."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from manta.api import ui
from manta.api.app import create_app
from manta.api.rest_version import HEADER, REST
from manta.api.security import credentials, request_guard
from manta.api.security.credentials import cookie_name
from manta.api.security.request_guard import MAX_BODY_BYTES, OwnAddresses, RequestGuard, refusal
from manta.service.identity import digest_of
from manta.service.store import keys
from tests.api.support.described_api import description_at
from tests.api.support.keys import add_key, bearer
from tests.api.support.problems import problem_of

PUBLIC = ("manta.example.org", "other.example.org:8443")
TERMINATED = "https that a proxy terminates, without saying so"
SESSION = {"cookie": "manta_session_8400=secret"}
JSON = {"content-type": "application/json"}


def code(method="POST", path="/v1/jobs/job_0/cancel", host="127.0.0.1:8400", scheme="http", **headers):
    given = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    ours = OwnAddresses.of(["localhost", "Trainer7"], PUBLIC, by_tls=scheme != "http")
    refused = refusal(method, path, given, ours, "http" if scheme == TERMINATED else scheme)
    return None if refused is None else (refused.kind.status, refused.kind.code)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8400", "[::1]:8400", "192.168.7.3", "localhost:8400", "TRAINER7", "trainer7.", "manta.example.org"],
)
def test_request_guard_accepts_addresses_and_own_names_as_hosts(host):
    assert code(host=host) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example:8400", "localhost.evil.example", "[::1", "a b", "127.0.0.1/link/?",
     "localhost:8400/link/?", "127.0.0.1?", "localhost#", "evil@localhost", "127.0.0.1\\link", "localhost "],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_request_guard_refuses_unknown_host_names(host, method):
    assert code(host=host, method=method) == (403, "unknown_host")


def test_request_guard_lets_probes_omit_the_host_header():
    assert code("GET", "/healthz", host="") is None and code("HEAD", "/readyz", host="") is None
    assert code("GET", "/healthz", host="evil.example") == code("GET", "/v1/me", host="") == (403, "unknown_host")


def test_service_answers_to_its_configured_host_names_only(store):
    app = create_app(SimpleNamespace(store=store), ["Manta.Example.org"])
    for host, status in (("manta.example.org", 200), ("localhost", 200), ("evil.example", 403)):
        assert TestClient(app, base_url=f"http://{host}").get("/healthz").status_code == status


CROSS_SITE = (403, "cross_site")
OURS = {
    "http": [
        ("127.0.0.1:8400", "http://127.0.0.1:8400"), ("localhost:8400", "http://localhost:8400"),
        ("trainer7", "http://TRAINER7"), ("trainer7:80", "http://trainer7"),
        ("[FE80::1]:8400", "http://[fe80::1]:8400"), ("trainer7:8400", "http://manta.example.org"),
    ],
    "https": [
        ("trainer7", "https://trainer7:443"), ("127.0.0.1:8400", "https://manta.example.org"),
        ("manta.example.org:8400", "https://manta.example.org:8400"),
        ("trainer7:8400", "https://other.example.org:8443"),
    ],
    TERMINATED: [
        ("localhost:8400", "https://localhost:8400"), ("manta.example.org", "https://manta.example.org"),
        ("127.0.0.1:9000", "http://127.0.0.1:9000"), ("localhost:9000", "http://localhost:9000"),
        ("[::1]:9000", "http://[::1]:9000"),
    ],
}  # fmt: skip
"""By scheme in browsers and Host: an origin of our own, behind a proxy, and past it by a forwarded port."""
FOREIGN = {
    "http": [
        ("127.0.0.1:8400", "http://127.0.0.1:3000"), ("127.0.0.1:8400", "https://127.0.0.1:8400"),
        ("127.0.0.1:8400", "http://127.0.0.1"), ("127.0.0.1:8400", "http://localhost:8400"),
        ("localhost:8400", "http://127.0.0.1:8400"), ("trainer7:8400", "http://trainer7:99"),
        ("127.0.0.1:8400", "ftp://127.0.0.1:8400"), ("127.0.0.1:8400", "chrome-extension://127.0.0.1"),
        ("127.0.0.1:8400", "null"), ("127.0.0.1:8400", "http://["), ("127.0.0.1:8400", "http://127.0.0.1:8400/"),
        ("127.0.0.1:8400", "http://127.0.0.1:x"), ("127.0.0.1:8400", ""),
        ("manta.example.org", "https://evil.example"), ("trainer7:8400", "https://manta.example.org"),
    ],
    "https": [
        ("manta.example.org", "http://manta.example.org"),
        ("manta.example.org", "https://manta.example.org:8443"),
        ("other.example.org:8443", "https://other.example.org"), ("localhost:8400", "http://localhost:8400"),
    ],
    TERMINATED: [
        ("localhost", "http://localhost"), ("localhost:9000", "http://localhost:9001"),
        ("trainer7:8400", "http://trainer7:8400"), ("192.0.2.7:8400", "http://192.0.2.7:8400"),
        ("manta.example.org:8400", "http://manta.example.org:8400"),
    ],
}  # fmt: skip
"""The same with origins of others: other ports, names and schemes of this machine, too."""


def rows_of(by_scheme):
    return [(scheme, *row) for scheme, rows in by_scheme.items() for row in rows]


@pytest.mark.parametrize(("scheme", "host", "origin"), rows_of(OURS))
def test_request_guard_lets_pages_of_the_service_change_state(scheme, host, origin):
    assert code(scheme=scheme, host=host, origin=origin) is None
    session = {"cookie": f"{cookie_name(host)}=secret"}
    assert code(scheme=scheme, host=host, origin=origin, manta_rest="1", **session) is None


@pytest.mark.parametrize(("scheme", "host", "origin"), rows_of(FOREIGN))
def test_request_guard_lets_foreign_pages_change_nothing(scheme, host, origin):
    for sender in ({}, {"authorization": "Bearer key"}, SESSION):
        assert code(scheme=scheme, host=host, origin=origin, manta_rest="1", **sender) == CROSS_SITE
    assert code(scheme=scheme, host=host, method="GET", origin=origin) is None, "a browser keeps the answer from it"


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", "", None])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "DELETE"])
def test_request_guard_accepts_cookies_only_from_own_pages(method, site):
    """A key without an origin is that of a program."""
    fetch = {} if site is None else {"sec_fetch_site": site}
    assert code(method, manta_rest="1", **SESSION, **fetch) == CROSS_SITE
    assert code(method, authorization="Bearer key", **SESSION, **fetch) is None
    assert code(method, manta_rest="1", sec_fetch_site="same-origin", **SESSION) is None
    assert code(method, sec_fetch_site="same-origin", **SESSION) == CROSS_SITE, "a header of ours cannot be in a form"
    assert code(method, origin="http://127.0.0.1:8400", **SESSION) == CROSS_SITE


@pytest.mark.parametrize("asked_as", ["empty", "image", "iframe", "script", "object"])
def test_request_guard_refuses_login_links_fetched_by_a_page(asked_as):
    assert code("GET", "/link/secret", sec_fetch_dest=asked_as) == CROSS_SITE
    for opened in ({"sec_fetch_dest": "document", "sec_fetch_site": "cross-site"}, {}):
        assert code("GET", "/link/secret", **opened) is None
    assert code("GET", sec_fetch_dest=asked_as) is None


def test_dashboard_sends_the_version_of_the_api_that_the_service_speaks():
    assert f'"{HEADER}": "{REST}"' in Path(ui.__file__).with_name("static").joinpath("core/api.js").read_text()


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x", ""]
)
def test_request_guard_refuses_bodies_that_are_not_json(content_type):
    assert code(content_length="2", content_type=content_type) == (415, "unsupported_media_type")
    assert code(transfer_encoding="chunked", content_type=content_type) == (415, "unsupported_media_type")
    assert code(content_length="0", content_type=content_type) is None
    assert code(content_length="2", content_type=content_type, path="/ui/socket") is None


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
def test_request_guard_accepts_json_bodies(content_type):
    assert code(content_length="2", content_type=content_type) is None


@given(st.text(), st.text(), st.text())
def test_request_guard_survives_any_header_values(host, origin, content_type):
    code(host=host, origin=origin, content_type=content_type, content_length="1")


def test_request_guard_refusal_is_a_problem_document_and_stores_nothing(service, document):
    encoded = {"content": httpx.Request("POST", "http://x", json=document).content}
    for body, headers, refused in (
        ({"json": document}, {"Origin": "https://evil.example"}, (403, "cross_site")),
        ({"json": document}, {"Host": "evil.example"}, (403, "unknown_host")),
        (encoded, {}, (415, "unsupported_media_type")),
    ):
        response = service.http.post("/v1/jobs", headers=headers, **body)
        assert (response.status_code, response.json()["code"]) == refused
        assert response.headers["content-type"] == "application/problem+json"
    assert service.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_request_body_is_refused_by_every_operation(service, chunked):
    size = MAX_BODY_BYTES + 1
    for operation in description_at(service.url).operations:
        content = (b" " * 65536 for _ in range(size // 65536 + 1)) if chunked else b" " * size
        path = re.sub(r"\{\w+\}", "job_000000000001", operation.path)
        response = service.http.request(operation.method, path, content=content, headers=JSON)
        assert (response.status_code, response.json()["code"]) == (413, "body_too_large"), operation.id


def test_request_whose_key_is_revoked_while_its_body_arrives_changes_nothing(service, document, monkeypatch):
    key, arrived = add_key(service.store), request_guard._arrived

    async def after_revocation(*arguments):
        body = await arrived(*arguments)
        service.store.write(lambda s: keys.revoke(s, None, keys.by_digest(s, digest_of(key)).id))
        return body

    monkeypatch.setattr(credentials, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(request_guard, "_arrived", after_revocation)
    assert problem_of(service.http.post("/v1/jobs", json=document, headers=bearer(key))) == (401, "unauthenticated")
    assert service.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(("comes", "passed_on"), [
    (({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}), []),
    (({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request", "body": b"}"}), [b"{}"]),
])  # fmt: skip
def test_request_whose_client_leaves_within_its_body_goes_no_further(comes, passed_on):
    """What was to be done is not known: half a body is none."""
    left, bodies = list(comes), []

    async def receive():
        return left.pop(0)

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])

    headers = [(b"host", b"localhost"), (b"content-length", b"2"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "headers": headers}
    asyncio.run(RequestGuard(app)(scope, receive, None))
    assert bodies == passed_on
