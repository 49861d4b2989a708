"""Weights of checkpoints written to folders of the service's machine, each by a separate process (`python -m
manta.workers.weights.export`): the service itself handles no arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sqlalchemy.orm import Session

from manta.service.control.file_work import FILE_SECONDS, FileWork, NotFinished
from manta.service.errors import ErrorKind, InvalidParameter, ServiceError
from manta.service.settings import without_secrets
from manta.service.store import Store, checkpoints, events, exports
from manta.service.store.database import INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, may_pass
from manta.service.store.tables import Export
from manta.service.tasks import backoff
from manta.workers.system.daemon_threads import in_daemon_thread
from manta.workers.weights.mapping import Dtype, Format

MAX_EXPORTS = 2
UPDATE_SECONDS = 2.0
STALLED_SECONDS = 600.0
"""Seconds without progress after which an export is given up: its place is needed by others."""
CLEANUP_SECONDS = 30.0
"""How long an export that is given up may take to remove what it has written: a model's weights are many GB."""
CLOSE_SECONDS = 2.0
"""How long the end of the service waits for exports that are being ended."""
_LAST_LINES = 5


class ExportNotPossible(ServiceError):
    """Nothing can be exported now; the message says what to do."""

    kind = ErrorKind(
        "export_not_possible", 409, "the checkpoint is not complete, or too many exports are being written already"
    )


class InvalidTarget(InvalidParameter):
    """The export may not be written there."""

    field = "to"


@dataclass
class _Run:
    """One export that is being written."""

    id: str
    process: subprocess.Popen[str]
    done: int = 0
    total: int | None = None
    output: list[str] = field(default_factory=list)
    """The last lines of its errors."""


class Exports:
    """All exports of one service. Safe for use by several threads."""

    def __init__(self, store: Store, roots: Sequence[Path], work: FileWork):
        """`roots`: folders below which exports may be written; a relative target is below the first. `work`: what they
        are looked at by."""
        self._store, self._roots, self._work = store, tuple(roots), work
        self._runs: dict[str, _Run] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._one_is_over = threading.Condition(self._lock)

    def begin(self, job_id: str, checkpoint_id: str, to: str, format: Format, dtype: Dtype | None) -> Export:
        """Begin to write the weights of a complete checkpoint to the folder `to`, which must not exist yet. Raises
        JobNotFound, CheckpointNotFound, JobBeingDeleted, InvalidTarget, ExportNotPossible."""
        try:
            target = self._work.run(("target", to), FILE_SECONDS, lambda: self._target(to))
        except NotFinished as error:
            raise ExportNotPossible(
                f"it is not known yet what is at {to} ({error}): {error.advice}, and export it again"
            ) from error
        with self._lock:
            if self._closed.is_set():
                raise ExportNotPossible("the service is shutting down: start this export after it restarts")
            if len(self._runs) >= MAX_EXPORTS:
                raise ExportNotPossible(
                    f"{MAX_EXPORTS} exports are running already; start this one when one has finished"
                )
            row, source = self._store.write(
                lambda session: self._start(session, job_id, checkpoint_id, target, format, dtype)
            )
            try:
                run = _Run(row.id, _started(source, target, format, dtype))
            except OSError as error:
                problem = f"the process that writes it cannot be started ({error}): try again"
                self._store.write(lambda session: exports.end(session, row.id, problem))
                raise ExportNotPossible(problem) from error
            self._runs[row.id] = run
        in_daemon_thread(f"export {row.id}", lambda: self._follow(run, job_id, target))
        return row

    def _start(
        self, session: Session, job_id: str, checkpoint_id: str, target: Path, format: Format, dtype: Dtype | None
    ) -> tuple[Export, str]:
        checkpoint = checkpoints.get(session, job_id, checkpoint_id)
        if checkpoint.state != checkpoints.COMPLETE:
            raise ExportNotPossible(f"{checkpoint.id} is {checkpoint.state}, and only a complete one can be exported")
        return exports.begin(session, job_id, checkpoint_id, str(target), format, dtype), checkpoint.path

    def _target(self, to: str) -> Path:
        """The folder that `to` names; links are resolved before it is compared with the roots."""
        if not to.strip():
            raise InvalidTarget("the folder has no name: give the name of a folder for the weights")
        if "://" in to:
            raise InvalidTarget(f"{to} is a URL: name a folder of the service's machine")
        folder = Path(to) if Path(to).is_absolute() else self._roots[0] / to
        real = Path(os.path.realpath(folder))
        if not any(real.is_relative_to(os.path.realpath(root)) and real != root for root in self._roots):
            allowed = ", ".join(map(str, self._roots))
            raise InvalidTarget(f"{to} is not below any of the folders that exports may be written to ({allowed})")
        try:
            is_there = real.exists()
        except OSError as error:  # the name is too long, or the service may not look into a folder
            raise InvalidTarget(f"nothing can be written to {to}: {error.strerror}; name another folder") from error
        if is_there:
            raise InvalidTarget(f"{real} exists already: name another folder, or remove it")
        return real

    def _follow(self, run: _Run, job_id: str, target: Path) -> None:
        """Record the progress of an export until it has ended, and then its outcome."""
        assert run.process.stdout is not None and run.process.stderr is not None
        stdout, stderr = run.process.stdout, run.process.stderr
        readers = [in_daemon_thread("export's output", lambda: _read_progress(run, stdout))]
        readers.append(in_daemon_thread("export's errors", lambda: _read_errors(run, stderr)))
        try:
            if self._ends(run):
                for reader in readers:
                    reader.result()
                problem = self._problem(run)
            else:
                in_daemon_thread(f"end of {run.id}", lambda: _terminate(run.process))
                problem = (
                    f"nothing was written for {STALLED_SECONDS:g} s: see that the file systems or stores of the "
                    "checkpoint and of the folder answer, and export it again"
                )
            for pause in backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS):
                noted = self._write_accepted(lambda session: _record_end(session, run, job_id, target, problem))
                if noted or self._closed.wait(pause):
                    break
        finally:
            with self._lock:
                del self._runs[run.id]
                self._one_is_over.notify_all()

    def _ends(self, run: _Run) -> bool:
        """Record the progress of an export until it has ended. False: it stands still."""
        moved_at, done = time.monotonic(), run.done
        while not _ends_within(UPDATE_SECONDS, run.process):
            if run.done != done:  # looked at before the clock: the last write may have taken long
                moved_at, done = time.monotonic(), run.done
            elif time.monotonic() - moved_at >= STALLED_SECONDS:
                return False
            self._write_accepted(lambda session: exports.note(session, run.id, run.done, run.total))
        return True

    def _problem(self, run: _Run) -> str | None:
        """Why an export that has ended has failed; None if it has not."""
        if run.process.returncode == 0:
            return None
        return "the service ended meanwhile: export it again" if self._closed.is_set() else _problem(run)

    def _write_accepted(self, operation: Callable[[Session], None]) -> bool:
        """Whether the database, which may be unreachable, has accepted the change."""
        try:
            self._store.write(operation)
        except Exception as error:
            if not may_pass(error):
                raise
            return False
        return True

    def close(self) -> None:
        """End all exports that are being written. They remove what they have written, which usually takes less than
        the CLOSE_SECONDS that this waits for them, and go on with it if not."""
        with self._lock:
            self._closed.set()
            for run in self._runs.values():
                run.process.terminate()
            self._one_is_over.wait_for(lambda: not self._runs, CLOSE_SECONDS)


def _started(source: str, target: Path, format: Format, dtype: Dtype | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "manta.workers.weights.export", source, "--to", str(target)]
    command += ["--format", format, "--json", *([] if dtype is None else ["--dtype", dtype])]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=without_secrets(os.environ),
        process_group=0,  # Ctrl-C in the service's terminal ends it by `close`, and only once
    )


def _ends_within(seconds: float, process: subprocess.Popen[str]) -> bool:
    """Whether a process ends in that time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _terminate(process: subprocess.Popen[str]) -> None:
    """End a process, which has CLEANUP_SECONDS to remove what it has written. One that waits for a mount may outlive
    even SIGKILL, so nobody waits for that."""
    process.terminate()
    if not _ends_within(CLEANUP_SECONDS, process):
        process.kill()


def _read_progress(run: _Run, lines: IO[str]) -> None:
    for line in lines:
        try:
            output = json.loads(line)
            run.done, run.total = int(output["done"]), int(output["of"])
        except (ValueError, KeyError, TypeError):  # the last line reports what it has written
            continue


def _read_errors(run: _Run, lines: Iterable[str]) -> None:
    for line in lines:
        run.output = [*run.output, line.strip()][-_LAST_LINES:]


def _problem(run: _Run) -> str:
    if run.output:
        return run.output[-1]
    code = run.process.returncode
    return f"the process that wrote it was ended by signal {-code}" if code < 0 else f"it ended with exit status {code}"


def _record_end(session: Session, run: _Run, job_id: str, target: Path, problem: str | None) -> None:
    exports.note(session, run.id, run.done, run.total)
    exports.end(session, run.id, problem)
    kind, message = "exported", f"weights were exported to {target}"
    if problem is not None:
        kind, message = "export_failed", f"weights could not be exported to {target}: {problem}"
    events.append(session, job_id, kind, message, data={"export": run.id, "path": str(target)})
