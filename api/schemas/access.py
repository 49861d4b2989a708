"""Responses of the REST API about projects, keys and the audit log."""

from __future__ import annotations

from manta.api.schemas import Answer, Time


class Project(Answer):
    """A group of jobs with shared access."""

    name: str
    """Name, which is also the id."""
    created_at: Time
    """When it was created."""


class ApiKey(Answer):
    """An API key, without the key itself."""

    id: str
    """Id."""
    name: str
    """What the key is for."""
    user: str | None
    """The user of the key."""
    project: str
    """Project of the key."""
    scope: str
    """read, submit or admin."""
    installation: bool
    """Whether it is valid for all projects."""
    created_at: Time
    """When it was created."""
    expires_at: Time | None
    """When it expires; null: never."""
    revoked_at: Time | None
    """When it was revoked."""
    highest_priority: int | None = None
    """Highest priority that jobs submitted with it may have; null: no limit."""


class NewApiKey(ApiKey):
    """A newly created key."""

    key: str
    """The key itself. It is only returned once and is not stored."""


class Me(Answer):
    """The key of the request, and its permissions."""

    key: str
    """Id of the key."""
    key_name: str
    """What the key is for."""
    user: str | None
    """The user of the key."""
    project: str
    """Project that it submits jobs to."""
    scope: str
    """read, submit or admin."""
    installation: bool
    """Whether it is valid for all projects."""
    browser: bool
    """Whether the request came from a signed-in browser instead of carrying the key."""
    highest_priority: int | None = None
    """Highest priority that jobs submitted with it may have; null: no limit."""


class AuditEntry(Answer):
    """One request to change something, whether it succeeded or not."""

    id: str
    """Increases with time."""
    time: Time
    """When it was answered."""
    project: str
    """Project of the key."""
    key: str | None
    """Id of the key; null: a command on the service's machine, without the service."""
    key_name: str
    """Name of the key at that time."""
    user: str | None
    """The user of the key."""
    operation: str
    """The requested operation, such as cancel_job."""
    target: str | None
    """Id of the job, key or node, or name of the project."""
    address: str | None
    """Address of the client."""
    status: int
    """HTTP status of the answer."""
    code: str | None
    """Code of the error, if it was refused."""


class OneTimeLink(Answer):
    """A link that signs a browser in, once."""

    path: str
    """Path of the link, relative to the service's address. The first browser that opens it is signed in."""
    expires_at: Time
    """When it expires."""
