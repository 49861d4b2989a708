"""The `manta` command: each command makes one call of the client and prints the result for users or, with --json, for
programs."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

from manta.api.cli import render
from manta.api.cli.overview import ABOUT, COMMANDS, MODULES, options
from manta.api.client import ApiError, Client, ServiceUnreachable, calls
from manta.api.requests import FaultRequest
from manta.api.schemas import Items, JobPlan, Recovery
from manta.api.schemas import Job as JobView
from manta.workers.errors import MantaError
from manta.workers.protocol.messages import FAULT_KINDS, FAULT_PHASES
from manta.workers.spec.problems import OWN_RULE, Problem, SpecError, describe_rule

T = TypeVar("T")

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
PAGE = 1000
"""Items asked for at a time: the most that the service gives."""


class Failed(typer.Exit):
    """The command cannot be done; the message says why."""

    def __init__(self, message: str, code: int, problem: Mapping[str, Any] | None = None):
        """`problem`: for programs, instead of the message; default: made of it."""
        super().__init__(code)
        self.message = message
        self.problem = problem or {"code": _CODES.get(code, "failed"), "detail": message}


_CODES = {EXIT_BAD_INPUT: "bad_input", EXIT_UNREACHABLE: "unreachable", EXIT_INTERRUPTED: "interrupted"}


def fail(message: str, code: int) -> typer.Exit:
    """Raise the returned exception to end the command with this sentence on stderr and exit code `code`."""
    return Failed(message, code)


def confirm_deletion(question: str) -> None:
    """Ask before something is deleted permanently; ends the command unless the answer is yes."""
    try:
        agreed = typer.confirm(question, err=True)
    except (typer.Abort, RuntimeError) as error:  # the latter where standard input is closed
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        typer.echo(err=True)  # ends the line of the question
        raise fail("there is no terminal to ask for confirmation: use --yes", EXIT_BAD_INPUT) from error
    if not agreed:
        raise typer.Abort


class MantaGroup(TyperGroup):
    """Converts the errors of all commands to sentences, or to JSON with --json, and exit codes, so that users see no
    traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(OWN_RULE).replace("Input should be ", "must be ")
            raise
        except (Failed, MantaError, SpecError, KeyboardInterrupt) as error:
            failed = _as_failed(error)
            typer.echo(json.dumps(failed.problem) if as_json else failed.message, err=True)
            raise typer.Exit(failed.exit_code) from error


def _as_failed(error: BaseException) -> Failed:
    """What a command that ends with `error` says, and its exit code."""
    if isinstance(error, Failed):
        return error
    if isinstance(error, ServiceUnreachable):
        return Failed(str(error), EXIT_UNREACHABLE)
    if isinstance(error, ApiError):
        code = EXIT_FAILED if error.problem.status >= 500 else EXIT_BAD_INPUT
        return Failed(_sentence_of(error), code, error.problem.model_dump(mode="json"))
    if isinstance(error, SpecError):
        return Failed("\n".join(problem.sentence for problem in error.problems), EXIT_BAD_INPUT)
    return Failed("", EXIT_INTERRUPTED) if isinstance(error, KeyboardInterrupt) else Failed(str(error), EXIT_BAD_INPUT)


def _sentence_of(error: ApiError) -> str:
    """All problems of a rejected spec; any other error as the service reported it."""
    return "\n".join(problem.sentence for problem in problems_in(error)) or str(error)


def problems_in(error: ApiError | SpecError) -> list[Problem]:
    """The problems of a rejected spec; none of any other error."""
    if isinstance(error, SpecError):
        return error.problems
    if error.problem.code not in ("invalid_spec", "unsupported"):
        return []
    return [Problem(each.path, each.rule, each.suggestion) for each in error.problem.errors]


app = typer.Typer(cls=MantaGroup, no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)

Url = Annotated[
    str | None, typer.Option("--url", help="The service's address; default: MANTA_URL, or the service of MANTA_HOME.")
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id, or a unique job name.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")]
RankNumber = Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")]


def connect(url: str | None) -> Client:
    """A client for the service at `url`, or for the service given by the environment."""
    return Client(url)


def console() -> Console:
    """A console for the current standard output; wide if it is not a terminal, so that tables are not cut. Markup is
    disabled, since names and messages may contain brackets."""
    made = Console(markup=False)
    return made if made.is_terminal else Console(width=200, markup=False)


def _show_state(job: JobView, as_json: bool) -> None:
    show(job, as_json, lambda console: console.print(f"{job.id} is {job.state}", highlight=False))


def show(answer: BaseModel, as_json: bool, draw: Callable[[Console], None]) -> None:
    """Print an answer as JSON for programs, or rendered for users."""
    if as_json:
        typer.echo(render.as_json(answer))
    else:
        draw(console())


def show_page(page: Items[Any], as_json: bool, draw: Callable[[Console], None]) -> None:
    """`show`, with a note for users if there are more items."""
    show(page, as_json, draw)
    if not as_json and page.next_cursor is not None:
        typer.echo(f"Showing {len(page.items)}; there are more: use --limit.", err=True)


def show_lines(entries: Iterable[BaseModel], as_json: bool, line: Callable[[Any], str], none: str) -> None:
    """Print each entry as a line as soon as it arrives; with `as_json` one JSON object per line. `none`: what to print
    for users if there are no entries."""
    entry = None
    for entry in entries:
        typer.echo(json.dumps(entry.model_dump(mode="json")) if as_json else line(entry))
    if entry is None and not as_json:
        typer.echo(none, err=True)


@app.command()
def status(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show one job."""
    with connect(url) as client:
        answer = client.job(job)
        plan = None if as_json else _plan_of(client, answer.id)
    show(answer, as_json, lambda console: render.job_page(console, answer, plan))


def _plan_of(client: Client, job: str) -> JobPlan | None:
    """None if the service's release does not plan."""
    try:
        return client.job_plan(job)
    except ApiError:
        return None


@app.command()
def cancel(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Stop a job permanently. Its checkpoints are kept."""
    with connect(url) as client:
        answer = client.cancel(job)
    _show_state(answer, as_json)


@app.command()
def pause(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Save a job's state and release its slots; `manta resume` continues it."""
    with connect(url) as client:
        answer = client.pause(job)
    _show_state(answer, as_json)


@app.command()
def resume(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Continue a paused job where it stopped."""
    with connect(url) as client:
        answer = client.resume(job)
    _show_state(answer, as_json)


@app.command()
def delete(
    job: JobId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Delete a finished job with its checkpoints, logs, metrics and events."""
    with connect(url) as client:
        if not yes:
            known = client.job(job)
            job = known.id
            about = f"{known.id} ({known.name}, {known.state}, step {known.step} of {known.steps})"
            confirm_deletion(f"Delete {about} with its checkpoints and logs permanently?")
        answer = client.delete(job)
    show(answer, as_json, lambda console: render.deletion(console, answer))


@app.command()
def retry(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Continue a failed job from where it failed."""
    with connect(url) as client:
        answer = client.retry(job)
    _show_state(answer, as_json)


@app.command()
def resize(
    job: JobId,
    data: Annotated[int, typer.Option(min=1, help="Number of data-parallel replicas.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change the number of replicas, with the same global batch."""
    with connect(url) as client:
        answer = client.resize(job, data)
    show(
        answer,
        as_json,
        lambda console: console.print(
            f"{answer.id} will continue with {render.counted(data, 'replica')}", highlight=False
        ),
    )


@app.command()
def ledger(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show how a job spent its time, second by second."""
    with connect(url) as client:
        answer = client.ledger(job)
    show(answer, as_json, lambda console: render.ledger_page(console, answer))


@app.command()
def recoveries(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """List a job's recoveries: the failure, the replaced ranks, and the duration of each phase."""
    with connect(url) as client:
        job_id = client.id_of(job)
        items = [*to_the_last(lambda cursor: client.recoveries(job_id, PAGE, cursor))]
    page = Items[Recovery](items=items)
    show(page, as_json, lambda console: render.recovery_table(console, page.items))


@app.command()
def inject(
    job: JobId,
    fault: Annotated[str, typer.Option("--fault", help=f"Kind of fault: {', '.join(FAULT_KINDS)}.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank.")],
    at_step: Annotated[
        int, typer.Option("--at-step", min=0, help="The step; default: the next one.", show_default=False)
    ] = 0,
    phase: Annotated[str, typer.Option("--phase", help=f"Phase of the step: {', '.join(FAULT_PHASES)}.")] = "data",
    seconds: Annotated[
        float, typer.Option("--seconds", help="slow: additional seconds per step; partition: duration.")
    ] = 0.0,
    delay: Annotated[float, typer.Option("--delay", help="kill, stop: seconds after the start of the phase.")] = 0.0,
    hold_gil: Annotated[bool, typer.Option("--hold-gil", help="hang: block all other threads, too.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Inject a fault into a running job; the service must have been started with --allow-faults."""
    words = {"kind": fault, "rank": rank, "at_step": at_step, "phase": phase}
    try:
        wanted = FaultRequest(**words, seconds=seconds, delay=delay, hold_gil=hold_gil)
    except ValidationError as error:
        raise bad_options(error, kind="--fault") from error
    with connect(url) as client:
        made = client.send(calls.inject(job, wanted))
    show(made, as_json, lambda console: console.print(f"{made.id}: {made.message}", highlight=False))


def bad_options(error: ValidationError, **called: str) -> typer.Exit:
    """Print the problems of options that set fields of a request. Raise the returned exception. `called`: options and
    arguments that have other names than their fields."""
    problems = []
    for entry in error.errors():
        field = str(entry["loc"][0]) if entry["loc"] else ""
        option = called.get(field) or (f"--{field.replace('_', '-')}" if field else "")
        problems.append(f"{option}: {describe_rule(entry)}" if option else describe_rule(entry))
    return fail("; ".join(problems), EXIT_BAD_INPUT)


def command_line(wanted: str | None = None) -> typer.Typer:
    """`manta` with all of its commands. If `wanted` is one of them, only its module is imported: imports such as the
    database's library take longer than most commands."""
    app.callback()(options)
    for module in [MODULES[wanted]] if wanted in MODULES else dict.fromkeys(MODULES.values()):
        importlib.import_module(f"manta.api.cli.{module}")
    _put_in_order(app)
    _unwrap_help(app)
    return app


def to_the_last(page_at: Callable[[str | None], Items[T]]) -> Iterator[T]:
    """All items of the list of which `page_at(cursor)` is the page at that cursor; None: the first."""
    cursor: str | None = None
    while True:
        page = page_at(cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def _put_in_order(app: typer.Typer) -> None:
    """Set the panel of each command of `app`, and its position in it."""
    panels = {command: panel for panel, commands in COMMANDS.items() for command in commands}
    order = [*panels]
    registered: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for each in registered:
        each.rich_help_panel = panels[_name_of(each)]
    app.registered_commands.sort(key=lambda each: order.index(_name_of(each)))
    app.registered_groups.sort(key=lambda each: order.index(_name_of(each)))


def _unwrap_help(app: typer.Typer) -> None:
    """Join the lines of each paragraph of the commands' help, which terminals wrap at their own widths."""
    for command in app.registered_commands:
        paragraphs = inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _unwrap_help(group.typer_instance)


def _name_of(registered: CommandInfo | TyperInfo) -> str:
    """Name of a command."""
    return str(registered.name or getattr(registered.callback, "__name__", ""))
