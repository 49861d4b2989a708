"""The tables of keys, projects and the audit. Times are Unix seconds."""

from __future__ import annotations

from sqlalchemy import Boolean, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.store.tables import Base
from service.store.types import AnyText, BigKey, Real


class Project(Base):
    """Jobs that are seen and changed together."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Name of the project, which is its id."""
    created_at: Mapped[float] = mapped_column(Real)
    """When it was created."""


class ApiKey(Base):
    """An API key. The key itself is not stored."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "project", "id"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """`key_` and 12 characters that sort by time of creation."""
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the key in hexadecimal."""
    name: Mapped[str] = mapped_column(String(100))
    """What it is for."""
    user: Mapped[str | None] = mapped_column("user_name", String(100))
    """The user it was created for; None: for no particular one."""
    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name"))
    """Project that it is bound to; for a key of the whole installation, the project that it submits into."""
    scope: Mapped[str] = mapped_column(String(16))
    """A `Scope`."""
    installation: Mapped[bool] = mapped_column(Boolean)
    """Whether it is valid for all projects."""
    created_at: Mapped[float] = mapped_column(Real)
    """When it was created."""
    expires_at: Mapped[float | None] = mapped_column(Real)
    """When it expires; None: never."""
    revoked_at: Mapped[float | None] = mapped_column(Real)
    """When it was revoked."""
    highest_priority: Mapped[int | None]
    """The highest priority that jobs may have with it; None: any."""


class BrowserToken(Base):
    """A one-time link to the dashboard, or the cookie that it was exchanged for. It permits what its key permits."""

    __tablename__ = "browser_tokens"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of the secret in hexadecimal."""
    kind: Mapped[str] = mapped_column(String(16))
    """link or session."""
    key_id: Mapped[str] = mapped_column(String(32), ForeignKey("api_keys.id"))
    """The key that requested the link."""
    expires_at: Mapped[float] = mapped_column(Real)
    """When it expires."""


class AuditEntry(Base):
    """One request that changed something, or would have changed it."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "project", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    """Grows with time."""
    time: Mapped[float] = mapped_column(Real)
    """When it was answered."""
    project: Mapped[str] = mapped_column(String(64))
    """Project of the key."""
    key_id: Mapped[str | None] = mapped_column(String(32))
    """The key; None: a user of the machine itself, with access to the database."""
    key_name: Mapped[str] = mapped_column(AnyText)
    """The key's name at that time."""
    user: Mapped[str | None] = mapped_column("user_name", AnyText)
    """The user of the key."""
    operation: Mapped[str] = mapped_column(String(64))
    """The operation, such as `cancel_job`."""
    target: Mapped[str | None] = mapped_column(String(200))
    """Id of the job, key or node, or name of the project, that it was about."""
    address: Mapped[str | None] = mapped_column(String(64))
    """Where the request came from."""
    status: Mapped[int]
    """HTTP status of the answer."""
    code: Mapped[str | None] = mapped_column(String(64))
    """Code of the problem document, if it was refused."""
