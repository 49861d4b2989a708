"""Metrics of a job that trains without the service: lines of JSON in a file, and a short line a step on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from workers.errors import MantaError
from workers.protocol.json_codec import spell
from workers.protocol.reports import Event, Message, Metrics
from workers.system.regular_files import open_regular
from workers.training.metric_names import VALIDATION_LOSS

_MAX_ROW_BYTES = 2**20


class MetricsFile:
    """Writes metrics as JSON lines, and prints a short line for each step."""

    def __init__(self, path: Path | None, steps: int):
        self._path, self._steps = path, steps
        self._file: BinaryIO | None = None
        self._has_begun = False
        self._failure: OSError | None = None
        self._is_heard = True

    def __enter__(self) -> MetricsFile:
        """Raises MantaError for a file that cannot be written."""
        if self._path is not None:
            try:
                self._file = self._path.open("ab")
            except OSError as error:
                raise self._unwritable(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if self._failure is not None and kind is None:
            raise self._unwritable(self._failure) from self._failure

    def _unwritable(self, error: OSError) -> MantaError:
        return MantaError(f"--metrics: {self._path} cannot be written ({error.strerror or error})")

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._failure = self._failure or error

    def write(self, messages: list[Message]) -> None:
        """Take a batch of the reporter's messages."""
        for payload in (message.payload for message in messages):
            if isinstance(payload, Metrics):
                for row in payload.rows:
                    self._metrics(row)
            elif isinstance(payload, Event):
                self._say(payload.message)

    def _metrics(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._add(self._file, row)
            except OSError as error:  # such as a full disk, which does not end the training
                self._failure = error
                self._close()
                print(f"{self._unwritable(error)}; training goes on", file=sys.stderr, flush=True)
        losses = {name: row[name] for name in row if name.startswith(VALIDATION_LOSS)}
        utilisation = f"  mfu_causal {row['mfu_causal']:.1%}" if "mfu_causal" in row else ""
        validation = "".join(f"  {name.replace('_', ' ', 2)} {loss:.4f}" for name, loss in losses.items())
        self._say(
            f"step {row['step']}/{self._steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:.0f} tokens/s{utilisation}{validation}"
        )

    def _say(self, words: str) -> None:
        """Print `words`, until stdout is closed: a closed pipe (`| head`) must not end the file."""
        if not self._is_heard:
            return
        try:
            print(words, flush=True)
        except OSError:
            self._is_heard = False
            with contextlib.suppress(OSError):  # otherwise flushing the rest would fail at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _add(self, file: BinaryIO, row: dict[str, Any]) -> None:
        if not self._has_begun and self._path is not None and self._path.is_file():  # not a pipe
            file.truncate(_end_of_rows_before(self._path, row["step"]))
        self._has_begun = True
        file.write(json.dumps(spell(row), allow_nan=False).encode() + b"\n")
        file.flush()


def _end_of_rows_before(path: Path, step: int) -> int:
    """Length in bytes of the rows of steps before `step` at the beginning of a file of metrics."""
    end = 0
    with open_regular(path) as file:
        while line := file.readline(_MAX_ROW_BYTES):
            try:
                if not line.endswith(b"\n") or not json.loads(line)["step"] < step:
                    break
            except (ValueError, KeyError, TypeError):  # not a row of metrics
                break
            end += len(line)
    return end
