"""The job database and the place of the checkpoints, as a service with these settings would use them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

from sqlalchemy.exc import SQLAlchemyError

from manta.service.doctor import Finding
from manta.service.settings import Settings
from manta.service.store import Store, leases
from manta.service.store.database import newest_revision
from manta.service.store.errors import StoreEmpty
from manta.service.store.health import refuse_none
from manta.service.store.location import file_of, parse_url, recorded_location, shown, url_in
from manta.workers.errors import MantaError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location

SKEW_SECONDS = 5.0
"""A larger difference between clocks makes times hard to read; S3 refuses clients that are off by 15 minutes."""


def database(settings: Settings) -> Iterator[Finding]:
    """Whether the database answers and is of this release; none is created."""
    url = parse_url(url_in(settings.home, settings.database_url))
    noted = recorded_location(settings.home)
    if settings.database_url is None and noted not in (None, shown(url)):
        where = f"the jobs of {settings.home} are in {noted}, which was not named"
        yield Finding("database", "problem", where, "name it with --database or MANTA_DATABASE_URL")
        return
    file = file_of(url)
    if file is not None and not file.exists():  # opening it would create its folder
        yield _to_be_made(str(file))
        return
    try:
        with contextlib.closing(Store(url_in(settings.home, settings.database_url))) as store:
            refuse_none(store)
            yield _revision(store)
            if file is None:
                yield _skew("the database", store.query(leases.now) - time.time())
    except StoreEmpty:
        yield _to_be_made(shown(url))
    except (MantaError, SQLAlchemyError) as error:
        yield Finding("database", "problem", str(error), "see whether it runs, and that its URL is right")


def _to_be_made(place: str) -> Finding:
    return Finding("database", "ok", f"{place} is empty; the first `manta up` makes what is needed")


def _revision(store: Store) -> Finding:
    revision, newest = store.revision, newest_revision()
    if revision == newest:
        return Finding("database", "ok", f"{store.location} answers, at revision {revision}")
    text = f"{store.location} is at revision {revision}, and this release's is {newest}"
    return Finding("database", "warning", text, "`manta up` brings it up to date; a newer one needs that release")


def checkpoints(place: Location | None) -> Iterator[Finding]:
    """Whether files can be written, read and removed where the checkpoints are stored."""
    if place is None:
        yield Finding("checkpoints", "ok", "in the home (MANTA_CHECKPOINTS would put them elsewhere)")
        return
    yield _usable("checkpoints", place)


def logs(settings: Settings) -> Iterator[Finding]:
    """Whether files can be written, read and removed where logs are stored, if that is not where checkpoints are."""
    if settings.logs is None:
        yield Finding("logs", "ok", "in the home alone (MANTA_LOGS would keep them elsewhere too)")
    elif settings.logs == settings.checkpoints:
        yield Finding("logs", "ok", f"in {settings.logs}, with the checkpoints")
    else:
        yield _usable("logs", settings.logs)


def _usable(what: str, place: Location) -> Finding:
    probe = place / f"manta-doctor-{secrets.token_hex(8)}"
    said = secrets.token_bytes(32)
    try:
        files = files_of(place)
        files.make_folder(place)
        files.write_atomically(probe, said)
        try:
            same = files.read(probe) == said
        finally:
            files.remove(probe)
    except (OSError, MantaError) as error:
        advice = "see that it is there, that it can be reached from here, and that the credentials may write and delete"
        return Finding(what, "problem", f"{place}: {error}", advice)
    if same:
        return Finding(what, "ok", f"{place} can be written, read and removed from")
    return Finding(what, "problem", f"{place} gives back other bytes than were written", "do not use it")


def _skew(whose: str, seconds: float) -> Finding:
    text = f"{whose}'s clock differs from this machine's by {abs(seconds):.1f} s"
    if abs(seconds) > SKEW_SECONDS:
        return Finding("clock", "warning", text, "set both by NTP")
    return Finding("clock", "ok", text)
