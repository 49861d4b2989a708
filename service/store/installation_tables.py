"""The tables of what belongs to the installation and to no job: keys, projects, the audit, its control planes, and its
own identity, which is written once, with the database, and read here. Times are Unix seconds."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, ForeignKey, Index, String, select
from sqlalchemy.orm import Mapped, Session, load_only, mapped_column

from manta.service.store.tables import Base
from manta.service.store.types import AnyText, BigKey, Real


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


class Installation(Base):
    """The single row that identifies this installation."""

    __tablename__ = "installation"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Random, and constant."""
    ray_namespace: Mapped[str] = mapped_column(String(64))
    """Namespace of its actors and placement groups in Ray."""
    home: Mapped[str | None] = mapped_column(AnyText)
    """Folder of the files of its jobs, if several control planes share them; None: the home of the only one."""


class Compatibility(Base):
    """The single row that says which releases can use the database although they do not know its newest revision."""

    __tablename__ = "compatibility"

    oldest_reader: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Releases whose own newest revision is this one or a later one."""


class ControlPlaneRow(Base):
    """A control plane that is alive, or has died and was not yet declared dead."""

    __tablename__ = "control_planes"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Random, different for each process."""
    place: Mapped[str] = mapped_column(AnyText)
    """Machine and home; each has one control plane at a time."""
    ray: Mapped[str] = mapped_column(AnyText)
    """The Ray that it uses."""
    lease_until: Mapped[float] = mapped_column(Real)
    """Time until which the control plane counts as alive, by the database's clock."""


class Lease(Base):
    """Which control plane owns a job, or a task that concerns all jobs."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    """The job's id, or another name."""
    owner: Mapped[str | None] = mapped_column(String(32))
    """Id of a control plane, which may be gone; None: no owner."""
    epoch: Mapped[int] = mapped_column(BigInteger)
    """Number of times that it was taken; each value is used once."""


def ray_namespace(session: Session, ray_is_new: bool) -> str:
    """The namespace in Ray of everything that belongs to this installation; it cannot see others. A database of an
    earlier release keeps the namespace that all installations shared then, so that running jobs are taken over, until
    Ray is a new one in which nothing can be running yet (`ray_is_new`). Raises NoResultFound if the row is missing:
    with another id, running jobs would not be found."""
    known_to_all = load_only(Installation.id, Installation.ray_namespace)  # the database may be of an earlier release
    installation = session.scalars(select(Installation).options(known_to_all)).one()
    own = f"manta-{installation.id}"
    if ray_is_new and installation.ray_namespace != own:
        installation.ray_namespace = own
    return installation.ray_namespace


def home_of_jobs(session: Session, home: str) -> str:
    """The folder of the files of all jobs, at the same path for all control planes that share them: the `home` of the
    first one."""
    installation = session.scalars(select(Installation).with_for_update()).one()
    if installation.home is None:
        installation.home = home
    return installation.home
