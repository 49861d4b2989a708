"""What the REST API answers about who may do what, and who did, as data."""

from __future__ import annotations

from api.schemas import Answer, Time


class Project(Answer):
    """Jobs that are seen and changed together."""

    name: str
    """Its name, which is its id."""
    created_at: Time
    """When it was made."""


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
    """Whether it is good for all projects."""
    created_at: Time
    """When it was made."""
    expires_at: Time | None
    """Since when it opens nothing; null: it does not expire."""
    revoked_at: Time | None
    """When it was revoked."""
    highest_priority: int | None = None
    """The highest priority that it gives jobs; null: any."""


class NewApiKey(ApiKey):
    """A key that was just made."""

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
    """Whether it is good for all projects."""
    browser: bool
    """Whether it was shown by a browser that is signed in, and not the key itself."""
    highest_priority: int | None = None
    """The highest priority that it gives jobs; null: any."""


class AuditEntry(Answer):
    """One request that changed something, or would have."""

    id: str
    """Grows with time."""
    time: Time
    """When it was answered."""
    project: str
    """Project of the key."""
    key: str | None
    """Id of the key; null: somebody on the machine itself, without the service."""
    key_name: str
    """Its name then."""
    user: str | None
    """Whom it is for."""
    operation: str
    """What was asked for, such as cancel_job."""
    target: str | None
    """Id of the job, key or node, or name of the project, that it was about."""
    address: str | None
    """Where it came from."""
    status: int
    """HTTP status of the answer."""
    code: str | None
    """Why it was refused."""


class OneTimeLink(Answer):
    """What signs a browser in, once."""

    path: str
    """Where it leads, below the service's address. Whoever opens it first is signed in."""
    expires_at: Time
    """Until when."""
