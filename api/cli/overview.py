"""All commands of `manta`, with a sentence for each: what `manta --help` and `manta --version` need. The modules of the
commands, which take longer to import than most commands take to run, are imported when a command is called."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Jobs": {
        "init": ("job_files", "Write a job file with comments, to begin with."),
        "submit": ("submit", "Submit a training job."),
        "ps": ("jobs", "List jobs, newest first."),
        "status": ("main", "Show one job."),
        "wait": ("submit", "Wait until jobs have ended; exit code 1 unless all of them succeeded."),
        "open": ("access", "Open the dashboard, or a job's page, in a browser, and print its address."),
        "logs": ("lines", "Print the newest output of a job's ranks."),
        "events": ("lines", "Print the events of a job, or of all jobs."),
        "metrics": ("metrics", "Show a job's metrics by step."),
        "compare": ("jobs", "Compare jobs, given by name or label: the differences of their specs, lowest loss first."),
        "pause": ("main", "Save a job's state and release its slots; `manta resume` continues it."),
        "resume": ("main", "Continue a paused job where it stopped."),
        "resize": ("main", "Change the number of replicas, with the same global batch."),
        "edit": ("jobs", "Change a job's name, priority or labels."),
        "cancel": ("main", "Stop a job permanently. Its checkpoints are kept."),
        "retry": ("main", "Continue a failed job from where it failed."),
        "delete": ("main", "Delete a finished job with its checkpoints, logs, metrics and events."),
    },
    "What a job does, and where its time goes": {
        "ranks": ("jobs", "Show the placement and state of a job's ranks."),
        "waits": ("jobs", "Show which ranks of a running job wait for which."),
        "stack": ("jobs", "Show the current stacks of all threads of a rank's trainer."),
        "trace": (
            "trace",
            "Record a job's next steps on all of its ranks, wait for them, and show their time by part.",
        ),
        "traces": ("trace", "List a job's traces, newest first."),
        "budget": (
            "trace",
            "Show the time of a job's steps by part, starting from the device's peak, next to the plan.",
        ),
        "ledger": ("main", "Show how a job spent its time, second by second."),
        "recoveries": (
            "main",
            "List a job's recoveries: the failure, the replaced ranks, and the duration of each phase.",
        ),
        "track": ("track", "Write a job's metrics, from the first step until the job ends, to an experiment tracker."),
    },
    "Checkpoints and trained models": {
        "export": ("checkpoints", "Export the weights of a job's newest checkpoint, or copy the whole checkpoint."),
        "evaluate": ("engine", "Evaluate a job's model: perplexity, or accuracy."),
        "generate": ("engine", "Generate text with a job's model."),
        "checkpoints": (
            "checkpoints",
            "List a job's durable checkpoints (`manta checkpoints JOB`), or verify, pull, push or delete one.",
        ),
    },
    "Before a job, or without a service": {
        "plan": (
            "plan",
            "Find the best layouts of a job, or estimate the time and memory of its layout, before it runs.",
        ),
        "calibrate": ("calibrate", "Measure this machine for plans and for `parallel: auto`."),
        "tokenize": ("engine", "Tokenize a job's corpus now, on this node."),
        "schema": ("job_files", "Print the JSON schema of job files, for editors."),
        "doctor": ("doctor", "Find problems of this machine, and suggest what to do."),
        "run": ("engine", "Train one job on this machine without a service."),
    },
    "The service and its nodes": {
        "up": ("service", "Start the service in the background."),
        "down": ("service", "Stop the service and everything it runs, and list what was running."),
        "serve": ("service", "Run the service in the foreground, for containers."),
        "nodes": ("nodes", "List the cluster's nodes and their ranks."),
        "drain": ("nodes", "Drain a node: all jobs move away before it goes away."),
        "link": ("access", "Print a link that signs a browser in to the dashboard with your key's permissions."),
    },
    "Administration": {
        "audit": ("access", "List requests that change something, newest first, including rejected ones."),
        "inject": (
            "main",
            "Inject a fault into a running job; the service must have been started with --allow-faults.",
        ),
        "keys": ("access", "API keys: create, add, list, revoke."),
        "projects": ("access", "Projects: create, list."),
        "db": ("db", "The job database: migrate, check, back up, restore."),
    },
}
"""The module and the sentence of each command, by the panel of the help that shows it, in order; those with subcommands
are last."""
MODULES = {command: module for commands in COMMANDS.values() for command, (module, _) in commands.items()}
ABOUT = "Elastic 3D-parallel training on Ray."


class Overview(TyperGroup):
    """Lists the commands without having imported them."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        wanted = ctx._protected_args[0]
        return _whole(wanted).invoke(ctx) if wanted in MODULES else super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command whose options are to be completed by the shell, or report that there is none."""
        return _whole(args[0]).resolve_command(ctx, args) if args[0] in MODULES else super().resolve_command(ctx, args)


def _whole(wanted: str) -> TyperGroup:
    from manta.api.cli.main import command_line

    made = typer.main.get_command(command_line(wanted))
    assert isinstance(made, TyperGroup)
    return made


def overview() -> typer.Typer:
    """`manta`, which imports a command's module when the command is called."""
    made = typer.Typer(cls=Overview, no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)
    made.callback()(options)
    for panel, commands in COMMANDS.items():
        for command, (_, sentence) in commands.items():
            made.command(command, help=sentence, rich_help_panel=panel)(_called_later)
    return made


def _called_later() -> None:
    """Stands for a command."""


def version_line() -> str:
    """What tells one release from another, as `docs/operations.md` uses it for upgrades."""
    from manta.api.rest_version import SUPPORTED_VERSIONS
    from manta.service.revisions import newest_revision
    from manta.workers.protocol.messages import SPOKEN

    release = importlib.metadata.version("manta-train")
    rest, protocols = (", ".join(map(str, sorted(spoken))) for spoken in (SUPPORTED_VERSIONS, SPOKEN))
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
