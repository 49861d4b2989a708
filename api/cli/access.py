"""`manta keys`, `projects`, `audit`, `link`, `open`: access control, the audit log, and the dashboard."""

from __future__ import annotations

import contextlib
import json
import time
import webbrowser
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, Json, MantaGroup, Url, app, bad_options, connect, fail, show, show_page
from manta.api.client import calls
from manta.api.requests import NewKey
from manta.api.security.permissions import DASHBOARD_PATH
from manta.service import installation_keys
from manta.service.identity import Scope, new_key
from manta.service.settings import Settings
from manta.service.store import ApiKey, Store
from manta.service.store.location import url_in
from manta.workers.errors import MantaError

DAY_SECONDS = 86_400.0

keys_app = typer.Typer(cls=MantaGroup, no_args_is_help=True, help="API keys: create, add, list, revoke.")
projects_app = typer.Typer(cls=MantaGroup, no_args_is_help=True, help="Projects: create, list.")
app.add_typer(keys_app, name="keys")
app.add_typer(projects_app, name="projects")

Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of lines shown.")]
Days = Annotated[
    float | None, typer.Option("--days", min=0.001, help="Valid for this many days; default: does not expire.")
]


class DatabaseOfOlderRelease(MantaError):
    """The database must first be migrated by the service."""


@keys_app.command("create")
def create_key(
    name: Annotated[str | None, typer.Argument(help="What the key is for.")] = None,
    scope: Annotated[Scope, typer.Option("--scope", help="Permissions of the key.")] = Scope.SUBMIT,
    project: Annotated[str | None, typer.Option("--project", help="Project of the key; default: your key's.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="User of the key.")] = None,
    days: Days = None,
    installation: Annotated[bool, typer.Option("--installation", help="Valid for all projects.")] = False,
    priority: Annotated[
        int | None, typer.Option("--highest-priority", help="Highest priority of its jobs; default: your key's.")
    ] = None,
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Create an admin key for all projects in the database of MANTA_HOME, without the service."
        ),
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it.

    It cannot be shown again."""
    if admin:
        if any(each is not None for each in (url, project, user, priority)):
            raise fail(
                "--admin creates a key in the database of MANTA_HOME; only a name and --days go with it", EXIT_BAD_INPUT
            )
        made, secret = _create_in_database(Settings.from_environment(), name or "admin", days)
        document = {"id": made.id, "name": made.name, "scope": made.scope, "installation": True, "key": secret}
        typer.echo(json.dumps(document, indent=2) if as_json else secret)
        return
    if name is None:
        raise fail("give a name for the key: `manta keys create NAME`", EXIT_BAD_INPUT)
    more: dict[str, Any] = {"project": project, "user": user, "expires_in_days": days, "installation": installation}
    more["highest_priority"] = priority
    try:
        wanted = NewKey(name=name, scope=scope, **{key: value for key, value in more.items() if value is not None})
    except ValidationError as error:
        raise bad_options(error, name="NAME", expires_in_days="--days") from error
    with connect(url) as client:
        answer = client.send(calls.create_key(wanted))
    show(answer, as_json, lambda console: typer.echo(answer.key))


def _create_in_database(settings: Settings, name: str, days: float | None) -> tuple[ApiKey, str]:
    """An admin key for all projects, and the key itself. Raises StoreUnusable, DatabaseOfOlderRelease."""
    with _database(settings) as store:
        secret = new_key()
        until = None if days is None else time.time() + days * DAY_SECONDS
        by = installation_keys.user_name()
        return store.write(lambda s: installation_keys.add_for_installation(s, secret, name, by, until)), secret


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[Store]:
    """The migrated database, opened without the service. Anyone with write access to it may create keys, since they can
    also change everything else in it. Raises StoreUnusable, DatabaseOfOlderRelease."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Store(url_in(settings.home, settings.database_url))
    try:
        if store.shuts_out_release_before:
            raise DatabaseOfOlderRelease(
                "the database is from a release without keys that may be running: start the service of this release "
                "on this machine once (`manta up`), then create the key"
            )
        store.migrate()
        yield store
    finally:
        store.close()


@keys_app.command("add")
def add_given_key(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    scope: Annotated[Scope, typer.Option("--scope", help="Permissions of the key, in all projects.")] = Scope.ADMIN,
    as_json: Json = False,
) -> None:
    """Add the key in MANTA_API_KEY, generated elsewhere, to the database for all projects, without the service.

    Adding it again changes nothing."""
    settings = Settings.from_environment()
    secret = settings.api_key
    if secret is None:
        raise fail("set MANTA_API_KEY to the key to add", EXIT_BAD_INPUT)
    with _database(settings) as store:
        added = store.write(lambda session: installation_keys.add_existing_key(session, secret, name, scope))
    document = {"id": added.id, "name": added.name, "scope": added.scope, "installation": True}
    typer.echo(
        json.dumps(document, indent=2) if as_json else f"{added.id} ({added.name}) is valid, scope {added.scope}"
    )


@keys_app.command("list")
def list_keys(limit: Limit = 50, url: Url = None, as_json: Json = False) -> None:
    """List API keys, newest first, including expired and revoked ones."""
    with connect(url) as client:
        page = client.keys(limit)
    show_page(page, as_json, lambda console: render.key_table(console, page.items))


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, from `manta keys list`.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Revoke a key."""
    if not key:
        raise fail("give the id of a key; `manta keys list` lists the keys", EXIT_BAD_INPUT)
    with connect(url) as client:
        answer = client.revoke_key(key)
    show(answer, as_json, lambda console: console.print(f"{answer.id} ({answer.name}) is revoked", highlight=False))


@projects_app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Create a project."""
    with connect(url) as client:
        answer = client.create_project(name)
    show(answer, as_json, lambda console: console.print(f"project {answer.name} is created", highlight=False))


@projects_app.command("list")
def list_projects(limit: Limit = 50, url: Url = None, as_json: Json = False) -> None:
    """List the projects that your key is valid for."""
    with connect(url) as client:
        page = client.projects(limit)
    show_page(page, as_json, lambda console: render.project_table(console, page.items))


@app.command()
def audit(
    key: Annotated[str | None, typer.Option("--key", help="Only requests with this key.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Only requests about this job, key, node or project.")
    ] = None,
    limit: Limit = 50,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List requests that change something, newest first, including rejected ones."""
    with connect(url) as client:
        page = client.audit(key, target, limit)
    show_page(page, as_json, lambda console: render.audit_table(console, page.items))


Page = Annotated[str | None, typer.Argument(metavar="JOB", help="Job id or name; default: the list of jobs.")]


@app.command("open")
def open_page(job: Page = None, url: Url = None) -> None:
    """Open the dashboard, or a job's page, in a browser, and print its address.

    `manta link` prints an address that also signs a browser in."""
    with connect(url) as client:
        address = f"{client.url}{DASHBOARD_PATH}/" + (f"jobs/{client.id_of(job)}" if job else "")
    typer.echo(address)
    with contextlib.suppress(webbrowser.Error):
        browser = webbrowser.get()
        if type(browser) is not webbrowser.GenericBrowser:  # which is one in the terminal
            browser.open_new_tab(address)


@app.command()
def link(job: Page = None, url: Url = None, as_json: Json = False) -> None:
    """Print a link that signs a browser in to the dashboard with your key's permissions.

    It works once and expires after ten minutes."""
    with connect(url) as client:
        page = f"?job={client.id_of(job)}" if job else ""
        made = client.link()
        address = f"{client.url}{made.path}{page}"
    document = {"url": address, **made.model_dump(mode="json")}
    typer.echo(json.dumps(document, indent=2) if as_json else address)
