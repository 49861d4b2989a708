"""The key that an embedded service makes for its own user: a file in the home that nobody else can read. Commands and
clients of the same home take it up by themselves."""

from __future__ import annotations

import os
import pwd
import secrets
import stat
import time
from pathlib import Path

from sqlalchemy.orm import Session

from service.identity import DEFAULT_PROJECT, Scope, digest_of, new_key
from service.store import ApiKey, Store, audit, keys
from service.store.audit import Deed
from workers.errors import MantaError

FILE_NAME = "api.key"
_LONGEST = 200


class KeyFileUnsafe(MantaError):
    """Somebody else could have read the key, or have put it there."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} {why}: remove it, and the next start of the service makes another key")


def read_key(home: Path) -> str | None:
    """The automatic key of `home`; None where there is none. Raises KeyFileUnsafe."""
    path = home / FILE_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileUnsafe(path, f"cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileUnsafe(path, "is no file")
        if status.st_uid != os.geteuid():
            raise KeyFileUnsafe(path, "belongs to another user")
        if status.st_mode & 0o077:
            raise KeyFileUnsafe(path, "can be read or written by others")
        return file.read(_LONGEST).strip() or None


def ensure(store: Store, home: Path) -> None:
    """See to it that `home` has a key with which everything may be done, and that the database knows it. One that was
    revoked is replaced. Raises KeyFileUnsafe."""
    known = read_key(home)
    if known is None or not store.write(lambda session: _is_good(session, known)):
        made = new_key()
        _write(home / FILE_NAME, made)
        store.write(lambda session: add_for_installation(session, made, "automatic", "the service"))


def _is_good(session: Session, secret: str) -> bool:
    """Whether the database takes this key. One that it does not know, since it is another database, it is told of."""
    key = keys.by_digest(session, digest_of(secret))
    if key is None:
        add_for_installation(session, secret, "automatic", "the service")
        return True
    return keys.is_good(key, time.time())


def add_for_installation(
    session: Session,
    secret: str,
    name: str,
    by: str,
    expires_at: float | None = None,
    scope: Scope = Scope.ADMIN,
) -> ApiKey:
    """Have the database know a key that is good for all projects. `by`: who on the machine made it."""
    key = keys.create(session, digest_of(secret), name, scope, installation=True, expires_at=expires_at)
    audit.append_local(session, by, DEFAULT_PROJECT, Deed("create_key", key.id, "local", 201))
    return key


def user_name() -> str:
    """Who runs this process, as the machine calls them."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _write(path: Path, secret: str) -> None:
    """In one step, so that nobody ever reads half a key; with a name in between that nobody can guess."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
