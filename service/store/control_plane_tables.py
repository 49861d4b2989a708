"""The tables of the installation, and of its control planes. Times are Unix seconds."""

from __future__ import annotations

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from service.store.tables import Base
from service.store.types import AnyText, Real


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
