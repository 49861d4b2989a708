"""The tables of the installation, and of its control planes. Times are Unix seconds."""

from __future__ import annotations

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from service.store.tables import Base
from service.store.types import AnyText, Real


class Installation(Base):
    """The one row that says which installation this is."""

    __tablename__ = "installation"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Random, and never another."""
    ray_namespace: Mapped[str] = mapped_column(String(64))
    """Namespace of its actors and placement groups in Ray."""
    home: Mapped[str | None] = mapped_column(AnyText)
    """Folder of the files of its jobs, where several control planes share them; None: the home of the one there is."""


class Compatibility(Base):
    """The one row that says which releases can use the database, though they do not know its newest revision."""

    __tablename__ = "compatibility"

    oldest_reader: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Their own newest revision is this one or a later one."""


class ControlPlaneRow(Base):
    """A control plane that lives, or has died and was not yet declared dead."""

    __tablename__ = "control_planes"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Random, another one for each process."""
    place: Mapped[str] = mapped_column(AnyText)
    """Machine and home; there is one at a time in each."""
    ray: Mapped[str] = mapped_column(AnyText)
    """Which Ray it uses."""
    lease_until: Mapped[float] = mapped_column(Real)
    """Until when it counts as living, by the database's clock."""


class Lease(Base):
    """Which control plane owns a job, or what concerns all of them."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    """The job's id, or another name."""
    owner: Mapped[str | None] = mapped_column(String(32))
    """Id of a control plane, which may be gone; None: none."""
    epoch: Mapped[int] = mapped_column(BigInteger)
    """How often it was taken; never the same again."""
