"""`manta --version`: the release, and which other releases it works with."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from api.rest_version import SPOKEN as SPOKEN_REST
from workers.protocol.messages import SPOKEN as SPOKEN_PROTOCOLS


def version_line() -> str:
    """What tells one release from another, as `docs/operations.md` uses it for upgrades."""
    from service.store.database import newest_revision  # with SQLAlchemy, which most commands do without

    release = importlib.metadata.version("manta-train")
    rest, protocols = (", ".join(map(str, sorted(spoken))) for spoken in (SPOKEN_REST, SPOKEN_PROTOCOLS))
    return f"manta {release} (REST {rest}; protocol {protocols}; database revision {newest_revision()})"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the release and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What `manta` takes before a command."""
