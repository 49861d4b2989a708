"""Reading job files for commands, with overridden values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.main import EXIT_BAD_INPUT, fail
from workers.spec.changes import changes_in, with_changes
from workers.spec.reading import MAX_BYTES, document_of, read_document, with_absolute_paths

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as train.steps=100; may be repeated."),
]


def read_file(file: Path, changes: Sequence[str] = ()) -> Any:
    """The document in `file`, or in standard input for -, with `changes` (each KEY=VALUE). Relative paths are resolved
    against the file's folder, or the current one for standard input. Raises SpecError."""
    try:
        if file == Path("-"):
            if sys.stdin is None:
                raise fail("standard input is closed: name a file, or pass the job's document there", EXIT_BAD_INPUT)
            content = typer.get_binary_stream("stdin").read(MAX_BYTES + 1)
            document = document_of(content, "standard input", Path.cwd())
        else:
            document = read_document(file)
    except OSError as error:
        advice = "; give - to read what another command writes" if file.is_fifo() else ""
        raise fail(f"cannot read {file}: {error.strerror or error}{advice}", EXIT_BAD_INPUT) from error
    return with_absolute_paths(with_changes(document, changes_in(changes)), Path.cwd())


def labelled(document: Any, given: Sequence[str]) -> Any:
    """A JobSpec's document with additional labels, each KEY=VALUE."""
    pairs = [text.partition("=") for text in given]
    if not all(equals for _, equals, _ in pairs):
        raise fail("give labels as --label KEY=VALUE", EXIT_BAD_INPUT)
    labels = (document.get("labels") or {}) if isinstance(document, dict) else None
    if not pairs or not isinstance(labels, dict):  # the service reports the problem
        return document
    return {**document, "labels": {**labels, **{key: value for key, _, value in pairs}}}
