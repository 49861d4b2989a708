"""The identity of the installation. Written once, with the database."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session, load_only

from service.store.control_plane_tables import Installation


def ray_namespace(session: Session, ray_is_new: bool) -> str:
    """The namespace in Ray of everything that belongs to this installation; it cannot see others.

    A database of an earlier release keeps the namespace that all installations shared then, so that running jobs are
    taken over, until Ray is a new one in which nothing can be running yet (`ray_is_new`). Raises NoResultFound if the
    row is missing: with another id, running jobs would not be found.
    """
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
