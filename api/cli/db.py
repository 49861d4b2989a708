"""`manta db ...`: commands for the job database. None of them needs a running service."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, Json, app
from manta.api.cli.service import Database, settings_with
from manta.api.server import lock_home
from manta.service.control.takeover import MAX_NAMED
from manta.service.settings import Settings
from manta.service.states import SUPERVISED
from manta.service.store import Store
from manta.service.store.backup_file import back_up, restore
from manta.service.store.health import problems
from manta.service.store.jobs import unfinished_summaries
from manta.service.store.location import parse_url, shown, url_in
from manta.workers.errors import MantaError

db = typer.Typer(no_args_is_help=True, help="The job database: migrate, check, back up, restore.")
app.add_typer(db, name="db")


class FileNotWritten(MantaError):
    """A file cannot be written."""


class DatabaseCorrupt(MantaError):
    """The database has problems; the message lists all of them."""


class JobsOfPreviousRelease(MantaError):
    """Jobs are running under a release that could no longer use the database; the message lists them."""

    def __init__(self, jobs: Sequence[str], location: str):
        more = f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
        super().__init__(
            f"{', '.join(jobs[:MAX_NAMED])}{more} may be running under a release that could not use {location} after "
            "its migration, so nothing was changed: pause them, or let them finish, and then upgrade; "
            "`manta up` first asks their processes whether it can take them over (docs/operations.md, Upgrades)"
        )


@db.command()
def upgrade(database: Database = None, as_json: Json = False) -> None:
    """Migrate the database to the schema of this release, as `manta up` does; refused while jobs run under a release
    that could no longer use it."""
    with _opened(settings_with(database)) as store:
        if store.shuts_out_release_before:
            _refuse_what_runs(store)
        before = store.revision
        store.migrate()
        same = "is" if before == store.revision else f"was migrated from revision {before or 'none'} and is"
        _print(
            f"{store.location} {same} at revision {store.revision}.",
            {"database": store.location, "before": before, "revision": store.revision},
            as_json,
        )


def _refuse_what_runs(store: Store) -> None:
    """Raises JobsOfPreviousRelease. Whether this release can take the jobs over is only known to the processes that run
    them."""
    with store.read() as session:
        running = [job.id for job in unfinished_summaries(session) if job.state in SUPERVISED]
    if running:
        raise JobsOfPreviousRelease(running, store.location)


@db.command()
def check(database: Database = None, as_json: Json = False) -> None:
    """Check the integrity of the whole database, and compare its schema with that of this release."""
    with _opened(settings_with(database)) as store:
        unsound = problems(store)
        document = {"database": store.location, "revision": store.revision, "sound": not unsound, "problems": unsound}
        if unsound and not as_json:
            raise DatabaseCorrupt("\n".join(f"{store.location}: {problem}" for problem in unsound))
        _print(f"{store.location} is sound, at revision {store.revision}.", document, as_json)
        if unsound:
            raise typer.Exit(EXIT_BAD_INPUT)


@db.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file; it becomes an SQLite database.", dir_okay=False)],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Write a consistent copy of the database to a file.

    The service may be running."""
    with _opened(settings_with(database)) as store:
        try:
            back_up(store, file.absolute())
        except OSError as error:
            raise FileNotWritten(f"cannot write {file}: {error.strerror}" if error.strerror else str(error)) from error
        size = file.stat().st_size
        _print(
            f"{store.location} is backed up to {file} ({size} bytes).",
            {"database": store.location, "file": str(file.absolute()), "bytes": size},
            as_json,
        )


@db.command("restore")
def restore_command(
    file: Annotated[Path, typer.Argument(help="A file written by `manta db backup`.", dir_okay=False)],
    replace: Annotated[bool, typer.Option("--replace", help="Also if the database has jobs.")] = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Replace the database with a backup, while no service uses it."""
    settings = settings_with(database)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.closing(lock_home(settings.home)):
        url = url_in(settings.home, settings.database_url)
        count = restore(url, file.absolute(), replace, time.time())
    sentences = f"The database was restored from {file}. Unfinished jobs: {count}."
    if count:
        sentences += (
            "\n`manta up` takes over those that are running, and pauses the others until you resume or cancel them."
        )
    document = {"database": shown(parse_url(url)), "file": str(file.absolute()), "unfinished_jobs": count}
    _print(sentences, document, as_json)


def _print(sentence: str, document: Mapping[str, Any], as_json: bool) -> None:
    typer.echo(json.dumps(document) if as_json else sentence)


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator[Store]:
    store = Store(url_in(settings.home, settings.database_url))
    try:
        yield store
    finally:
        store.close()
