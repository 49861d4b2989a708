"""Which installation this is. Made once, with the database."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.store.tables import Installation


def ray_namespace(session: Session, ray_is_new: bool) -> str:
    """The namespace in Ray of everything that belongs to this installation; another one's are not seen there.

    A database of a release before keeps the namespace that all shared then, so that what runs there is taken over,
    until Ray is a new one in which nothing can run yet (`ray_is_new`). Raises NoResultFound where the row is missing:
    with another id nobody would find what runs.
    """
    installation = session.scalars(select(Installation)).one()
    own = f"manta-{installation.id}"
    if ray_is_new and installation.ray_namespace != own:
        installation.ray_namespace = own
    return installation.ray_namespace
