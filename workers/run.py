"""The engine alone: `python -m manta.workers.run CONFIG.yaml [--metrics FILE] [--checkpoints FOLDER] [--cache FOLDER]
[--stop-after-step N] [--trace FILE [--trace-steps K] [--trace-first-step N]]`.

One process for a layout of one rank; for more, `torchrun --nproc-per-node N -m manta.workers.run CONFIG.yaml`. CONFIG
is a JobSpec, of which the engine reads what concerns it. torch, whose import takes seconds, is imported once the job is
known to be valid."""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.run")

import argparse
import sys
from pathlib import Path

from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.interruption import ending_at_once
from manta.workers.settings import Launcher, read_launcher
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.reading import load_job_spec
from manta.workers.spec.submitted import with_vocabulary
from manta.workers.storage.locations import InvalidLocation, Location, parse_location


def command_parser(called: str) -> argparse.ArgumentParser:
    """The parser of the command's options. `called`: its name in the help."""
    parser = argparse.ArgumentParser(prog=called, description="Train one job without the service.")
    parser.add_argument("config", type=Path, metavar="FILE", help="the job's YAML file")
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="append one JSON object per step to this file; a resumed run keeps the earlier steps",
    )
    parser.add_argument(
        "--checkpoints",
        type=_location,
        metavar="FOLDER",
        help="save durable checkpoints in, and resume from, this folder or s3:// URL",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="keep tokens of corpora in this folder (default: MANTA_TOKEN_CACHE)",
    )
    parser.add_argument("--stop-after-step", type=_step, metavar="N", help="end after this step, as if interrupted")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record single steps action by action, as .json or, for Perfetto, .pftrace",
    )
    parser.add_argument(
        "--trace-steps", type=int, default=1, metavar="N", help="number of steps to record (default: 1)"
    )
    parser.add_argument(
        "--trace-first-step", type=int, default=0, metavar="N", help="first step that may be recorded (default: 2)"
    )
    return parser


def main(arguments: list[str] | None = None, called: str = "python -m manta.workers.run") -> int:
    """Entry point; returns the exit status. Errors of the user are one sentence on stderr. `called`: name in help."""
    options = command_parser(called).parse_args(arguments)
    try:
        spec = with_vocabulary(_spec_in(options.config))
        launcher = read_launcher()
        _check_world(spec, launcher)
        with ending_at_once():
            from manta.workers.standalone import TraceFile, alone_in, train

        trace = TraceFile(options.trace, options.trace_steps, options.trace_first_step) if options.trace else None
        with alone_in(options.checkpoints if launcher is None or launcher.rank == 0 else None):
            train(spec, launcher, options.metrics, options.checkpoints, options.stop_after_step, options.cache, trace)
    except SpecError as error:
        print(*error.lines(options.config), sep="\n", file=sys.stderr)
        return 2
    except (MantaError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _spec_in(file: Path) -> JobSpec:
    """The checked spec in `file`. Raises SpecError."""
    try:
        return load_job_spec(file)
    except OSError as error:
        raise SpecError([Problem("", f"cannot be read ({error.strerror or error})")]) from error


def _location(text: str) -> Location:
    try:
        return parse_location(text)
    except InvalidLocation as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a step, of which the first is 1, not {text!r}")
    return int(text)


def _check_world(spec: JobSpec, launcher: Launcher | None) -> None:
    world_size = launcher.world_size if launcher else 1
    needed = spec.layout.world_size
    if world_size != needed:
        raise MantaError(
            f"wrong number of processes ({world_size}): the layout needs {needed}; use "
            f"torchrun --nproc-per-node {needed} -m manta.workers.run FILE, or change parallel"
        )
