"""A REST call as a value: what to send, and how to read the answer."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from urllib.request import getproxies

import httpx
from pydantic import TypeAdapter, ValidationError

from manta.api import schemas
from manta.api.rest_version import HEADER, REST, service_incompatibility
from manta.api.serving.local_service import DEFAULT_URL, find_key, ssl_verification
from manta.service.settings import Settings
from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import spell
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.system.sockets import is_loopback

T = TypeVar("T")
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""Read timeout of streams, on which the service sends something every 15 seconds."""


class ApiError(MantaError):
    """The service refused a request; `problem` is its answer."""

    def __init__(self, problem: schemas.Problem):
        self.problem = problem
        super().__init__(problem.detail)


class ServiceUnreachable(MantaError):
    """No answer from the service."""

    def __init__(self, url: str, cause: Exception):
        self.url, self.cause = url, cause
        why = re.sub(r"^\[Errno -?\d+\] ", "", str(cause)) or type(cause).__name__
        what_to_do = "start it with `manta up`, or point MANTA_URL to where it runs"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            what_to_do = "if the certificate is right, set SSL_CERT_FILE to the file of its authority"
        super().__init__(f"cannot reach Manta at {url} ({why}); {what_to_do}")


@dataclass(frozen=True)
class JobPath:
    """Path of a resource of a job."""

    job: str
    """The job's id, or its name, which the client looks up before it sends anything (`api/client/calls.py`)."""
    resource: str = ""
    """The rest of the path."""

    def __str__(self) -> str:
        return f"/v1/jobs/{quote(self.job, safe='')}{self.resource}"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and the type of its answer."""

    answer: Any
    """Type of the answer."""
    method: str
    """HTTP method."""
    path: str | JobPath
    """Path below the service's address."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Query parameters; None ones are left out."""
    body: Any = None
    """JSON body."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional headers."""
    extra_seconds: float = 0.0
    """Seconds that the answer may take in addition to the usual timeout."""

    @property
    def job(self) -> str | None:
        """The job that it is about, by its id or its name; None if it is about no job."""
        return self.path.job if isinstance(self.path, JobPath) else None

    def about(self, job_id: str) -> Call[T]:
        """This call, about the job with id `job_id`."""
        assert isinstance(self.path, JobPath)
        return replace(self, path=replace(self.path, job=job_id))

    def request(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request, as `client` sends it."""
        given = {name: value for name, value in self.parameters.items() if value is not None}
        headers = {**self.headers, **({} if self.body is None else {"Content-Type": "application/json"})}
        content = None if self.body is None else _encoded(self.body)
        request = client.build_request(self.method, str(self.path), params=given, headers=headers, content=content)
        usual = client.timeout.read
        if self.extra_seconds and usual is not None:
            request.extensions["timeout"] = {**client.timeout.as_dict(), "read": usual + self.extra_seconds}
        return request

    def read(self, response: httpx.Response) -> T:
        """The answer in `response`, whose body was read. Raises ApiError."""
        raise_for_problem(response)
        adapter: TypeAdapter[T] = TypeAdapter(self.answer)
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            raise ApiError(_foreign(response)) from error


def checked_url(url: str) -> httpx.URL:
    """`url`, if it is valid. Raises ServiceUnreachable."""
    try:
        checked = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServiceUnreachable(url, error) from error
    if checked.scheme not in ("http", "https") or not checked.host:
        example = f"http://{url}" if url and "://" not in url else DEFAULT_URL
        raise ServiceUnreachable(url, ValueError(f"an address begins with http:// or https://, such as {example}"))
    return checked


def client_options(settings: Settings, url: str, key: str | None, is_test: bool) -> dict[str, Any]:
    """Options of httpx's client for the service at `url`; `key`: by default the one that `find_key` returns; `is_test`:
    it has a transport of its own. Raises KeyFileUnsafe, CertificateUnreadable, ServiceUnreachable."""
    address, verify = checked_url(url), is_test or ssl_verification(settings, url)
    if verify is True and not is_test:
        try:
            verify = httpx.create_ssl_context()  # SSL_CERT_FILE is of the environment, too
        except OSError as error:
            unusable = f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error.strerror}"
            raise ServiceUnreachable(url, RuntimeError(unusable)) from error
    return {
        "base_url": address,
        "timeout": TIMEOUT,
        "headers": usual_headers(key or find_key(settings, url)),
        "verify": verify,
        "trust_env": False,  # httpx reads NO_PROXY, too, but no networks, and fails for those of IPv6
        "proxy": None if is_test else proxy_for(address),
    }


def proxy_for(address: httpx.URL) -> str | None:
    """The environment's proxy for requests to `address`. None if there is none, NO_PROXY names the host, one of its
    domains or networks, or the host is this machine: a proxy would get the key, and cannot reach what listens on
    loopback."""
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    exempt = (each.strip().lower() for each in proxies.get("no", "").split(","))
    if not proxy or is_loopback(address.host) or any(_covers(entry, address) for entry in exempt):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _covers(entry: str, address: httpx.URL) -> bool:
    """Whether an entry of NO_PROXY covers a host."""
    host, domain = address.host, entry.strip("[]").removeprefix("*").removeprefix(".")
    if entry == "*" or domain in (host, f"{host}:{address.port}") or (domain and host.endswith(f".{domain}")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(domain, strict=False)
    except ValueError:
        return False


@contextlib.contextmanager
def explaining_proxy_errors(url: str) -> Iterator[None]:
    """The block makes a client of httpx. Raises ServiceUnreachable if the environment names an unusable proxy, or has a
    Python module in place of one that httpx needs."""
    try:
        yield
    except (ImportError, ValueError) as error:
        is_proxy = proxy_for(checked_url(url)) is not None
        whose = "the proxy of ALL_PROXY, HTTPS_PROXY or HTTP_PROXY" if is_proxy else "httpx cannot be used here"
        raise ServiceUnreachable(url, RuntimeError(f"{whose}: {error}")) from error


def usual_headers(key: str | None) -> dict[str, str]:
    """Headers of every request of a client with this API key."""
    return {HEADER: str(REST), **({} if key is None else {"Authorization": f"Bearer {key}"})}


def _encoded(document: Any) -> bytes:
    """A document as JSON. What YAML knows and JSON does not becomes text, for the service to judge.

    Raises SpecError for a document that contains itself.
    """
    try:
        return json.dumps(spell(document), default=str).encode()
    except RecursionError as error:
        raise SpecError([Problem("", "the document contains itself or is nested too deeply")]) from error


def raise_for_problem(response: httpx.Response) -> None:
    """Raise ApiError if `response`, whose body was read, is an error, or comes from a service of a release that this
    client does not support."""
    misunderstanding = service_incompatibility(response.headers.get(HEADER))
    if misunderstanding is not None:
        raise ApiError(
            schemas.Problem(code="other_release", title="Other release", status=400, detail=misunderstanding)
        )
    if response.is_success:
        return
    try:
        problem = schemas.Problem.model_validate_json(response.content)
    except ValidationError:
        problem = _foreign(response)
    raise ApiError(problem)


def _foreign(response: httpx.Response) -> schemas.Problem:
    """The problem of an answer that Manta did not write."""
    url, status = response.request.url, response.status_code
    detail = f"{url} answered {status} with something that is not Manta's; is another service running there?"
    return schemas.Problem(code="foreign_answer", title="Foreign answer", status=status, detail=detail)
