"""`manta doctor`: checks this machine and everything that a service would use from here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, Json, app, fail
from manta.api.cli.render import counted
from manta.api.cli.service import Database, settings_with
from manta.api.client import ApiError, Client, ServiceUnreachable
from manta.api.serving.local_service import running_service
from manta.service.doctor import Finding, checks, findings
from manta.service.settings import Settings
from manta.workers.config import JobSpec
from manta.workers.spec.reading import load_job_spec
from manta.workers.spec.submitted import with_vocabulary

_MARKS = {"ok": "ok  ", "warning": "WARN", "problem": "FAIL", "skipped": "-   "}


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="A job's YAML file: also check whether there is room for it.", dir_okay=False)
    ] = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Find problems of this machine, and suggest what to do.

    Checks the installation and everything that a service would use from here. Works before `manta up`, on a node, and
    in a container. Exit code 1 if there is a problem."""
    settings = settings_with(database)
    job = None if file is None else _read(file)
    all_checks = {**checks(settings, job), "service": lambda: _service(settings)}
    seen = []
    for finding in findings(all_checks):
        seen.append(finding)
        if not as_json:
            _print(finding)
    counts = {verdict: sum(each.verdict == verdict for each in seen) for verdict in _MARKS}
    if as_json:
        typer.echo(json.dumps({"items": [asdict(each) for each in seen], "counts": counts}))
    else:
        typer.echo(f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}")
    if counts["problem"]:
        raise typer.Exit(EXIT_FAILED)


def _read(file: Path) -> JobSpec:
    try:
        return with_vocabulary(load_job_spec(file))
    except OSError as error:
        raise fail(f"cannot read {file}: {error.strerror}", EXIT_BAD_INPUT) from error


def _print(finding: Finding) -> None:
    typer.echo(f"{_MARKS[finding.verdict]}  {finding.subject}: {finding.message}")
    if finding.advice:
        typer.echo(f"      -> {finding.advice}")


def _service(settings: Settings) -> Iterator[Finding]:
    """The service of this home or of MANTA_URL, and its nodes."""
    if settings.url is None and running_service(settings.home) is None:
        yield Finding("service", "skipped", f"no service is running with home {settings.home}")
        return
    try:
        with Client.of_home(settings.home) if settings.url is None else Client(settings.url) as client:
            client.ready()
            nodes = client.cluster().nodes
            address = client.url
            ways = list(_ways(client))
    except (ServiceUnreachable, ApiError) as error:
        yield Finding("service", "problem", str(error), "see its log: logs/service.log in the home")
        return
    yield Finding("service", "ok", f"{address} responds and can run jobs")
    for node in nodes:
        places = f"{node.free:g} of {node.total:g} slots free"
        if not node.alive:
            yield Finding(
                "nodes", "warning", f"{node.id[:12]} ({node.address}) does not respond", "no ranks are placed on it"
            )
        elif node.problem is not None:
            yield Finding("nodes", "problem", node.problem, "no ranks are placed on it until then")
        elif node.draining:
            yield Finding("nodes", "warning", f"{node.id[:12]} ({node.address}) is being drained; {places}")
        else:
            yield Finding("nodes", "ok", f"{node.id[:12]} ({node.address}) responds; {places}")
    yield from ways


def _ways(client: Client) -> Iterator[Finding]:
    """Whether the nodes reach each other, and what would be lost with Ray's head node."""
    try:
        seen = client.check_cluster()
    except ApiError as error:
        yield Finding("ports", "skipped", f"whether the nodes reach each other was not checked: {error}")
        return
    for problem in seen.problems:
        what, _, advice = problem.partition(": ")
        yield Finding("ports", "problem", what, advice)
    for warning in seen.warnings:
        yield Finding("cluster", "warning", warning)
    if seen.tries and not seen.problems:
        nodes = f"{counted(seen.nodes, 'node')} {'reaches its own ports' if seen.nodes == 1 else 'reach each other'}"
        yield Finding("ports", "ok", f"{nodes} ({counted(seen.tries, 'connection')} tried)")
