"""Keys for tests: made for this run, and put straight into the database."""

from sqlalchemy.orm import Session

from manta.service.identity import DEFAULT_PROJECT, Scope, digest_of, new_key
from manta.service.store import Project, Store, keys, projects

ADMIN = new_key()
"""What tests send where they are about something else: everything may be done with it."""


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}


def add_admin(store: Store) -> None:
    """Have a database know ADMIN."""
    store.write(lambda session: keys.create(session, digest_of(ADMIN), "admin", Scope.ADMIN, installation=True))


def add_key(store: Store, scope: str = "admin", project: str = DEFAULT_PROJECT, **more) -> str:
    """A new key for a project, which is made if it is not there."""
    return store.write(lambda session: _add(session, scope, project, **more))


def add_keys(store: Store, project: str) -> dict[Scope, str]:
    """A key of each scope."""
    return store.write(lambda session: {scope: _add(session, scope, project) for scope in Scope})


def _add(session: Session, scope: str, project: str, **more) -> str:
    if session.get(Project, project) is None:
        projects.create(session, project)
    key = new_key()
    keys.create(session, digest_of(key), more.pop("name", f"{scope} of {project}"), Scope(scope), project, **more)
    return key
