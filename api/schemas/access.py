"""Answers of the REST API about keys, projects and the audit, as data."""

from __future__ import annotations

from api.schemas import Answer, Time


class Project(Answer):
    """Jobs that are seen and changed together."""

    name: str
    """Its name, which is its id."""
    created_at: Time
    """When it was created."""


class ApiKey(Answer):
    """What is known of an API key; not the key."""

    id: str
    """Its id."""
    name: str
    """What it is for."""
    user: str | None
    """Whom it is for."""
    project: str
    """Project that it is bound to."""
    scope: str
    """read, submit or admin."""
    installation: bool
    """Whether it is valid for all projects."""
    created_at: Time
    """When it was created."""
    expires_at: Time | None
    """When it expires or expired; null: it does not expire."""
    revoked_at: Time | None
    """When it was revoked."""
    highest_priority: int | None = None
    """The highest priority that jobs submitted with it may have; null: any."""


class NewApiKey(ApiKey):
    """A key that was just created."""

    key: str
    """The key itself. It is shown this once and kept nowhere."""


class Me(Answer):
    """Who asks, and what that allows."""

    key: str
    """Id of the key."""
    key_name: str
    """What the key is for."""
    user: str | None
    """Whom it is for."""
    project: str
    """Project that it submits into."""
    scope: str
    """read, submit or admin."""
    installation: bool
    """Whether it is valid for all projects."""
    browser: bool
    """Whether the request came from a signed-in browser rather than with the key itself."""
    highest_priority: int | None = None
    """The highest priority that jobs submitted with it may have; null: any."""


class AuditEntry(Answer):
    """One request that changed something, or would have."""

    id: str
    """Grows with time."""
    time: Time
    """When it was answered."""
    project: str
    """Project of the key."""
    key: str | None
    """Id of the key; null: a user of the machine itself, without the service."""
    key_name: str
    """The key's name at that time."""
    user: str | None
    """Whom it is for."""
    operation: str
    """The operation, such as cancel_job."""
    target: str | None
    """Id of the job, key or node, or name of the project, that it acted on."""
    address: str | None
    """Address that the request came from."""
    status: int
    """HTTP status of the answer."""
    code: str | None
    """Why it was refused."""


class OneTimeLink(Answer):
    """A link that signs a browser in, once."""

    path: str
    """Path below the service's address. The first browser that opens it is signed in."""
    expires_at: Time
    """When it expires."""
