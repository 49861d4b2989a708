"""The live progress line of a job: step, loss, tokens/s, MFU, ETA."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from manta.api.client.retries import RetryPolicy
from manta.api.schemas import Job
from manta.service.states import HELD, JobState, is_final

POLL_SECONDS = 0.25
PLAIN_SECONDS = 5.0
"""Seconds between lines if the output is not a terminal."""
_BAR_WIDTH = 24


class JobReader(Protocol):
    """A source of jobs, such as `manta.api.client.Client`."""

    def job(self, job_id: str) -> Job:
        """The current state of the job."""


def duration(seconds: float | None) -> str:
    """`seconds` as text, such as 1h02m, 3m05s, 12s, <1s; - if unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole == 0 < seconds:
        return "<1s"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def figure(value: float | None, digits: int) -> str:
    """`value` with `digits` decimals; - if unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(ratio: float | None) -> str:
    """A ratio as a percentage; - if unknown."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def progress_line(job: Job) -> str:
    """A job's progress in one line."""
    filled = _BAR_WIDTH * job.step // job.steps
    bar = "#" * filled + "." * (_BAR_WIDTH - filled)
    latest, mean = job.metrics.latest, job.metrics.mean
    parts = [
        f"{job.state:<10} [{bar}] {job.step}/{job.steps}",
        f"loss {figure(latest.get('loss'), 4)}",
        f"{figure(mean.get('tokens_per_second'), 0)} tokens/s",
        f"MFU {percent(mean.get('mfu_full'))}",
        f"ETA {duration(job.eta_seconds)}",
    ]
    if job.restarts:
        parts.append(f"restarts {job.restarts}")
    if job.message and (job.state == JobState.QUEUED or job.reason == HELD):
        parts.append(job.message)
    return "  ".join(parts)


def follow(
    reader: JobReader,
    job_id: str,
    console: Console,
    poll_seconds: float = POLL_SECONDS,
    on_progress: Callable[[Job], None] = lambda job: None,
) -> Job:
    """Show a job's progress on `console` until the job is final, and return it. `on_progress`: called at each poll. On
    a terminal one line is rewritten; otherwise a line is printed from time to time, and at each change of state."""
    if not console.is_terminal:
        return _follow_plainly(reader, job_id, console, poll_seconds, on_progress)
    with Live(console=console, refresh_per_second=8) as live:
        for job in watch(reader, job_id, poll_seconds, _printing_retries(console)):
            live.update(Text(progress_line(job), no_wrap=True, overflow="ellipsis"))
            on_progress(job)
    return job


def _printing_retries(console: Console) -> RetryPolicy:
    return RetryPolicy(notify=lambda sentence: console.print(sentence, markup=False, highlight=False, soft_wrap=True))


def watch(
    reader: JobReader, job_id: str, poll_seconds: float = POLL_SECONDS, retries: RetryPolicy | None = None
) -> Iterator[Job]:
    """The job every `poll_seconds` until it is final, which is the last item. After the first answer, a service that
    does not respond is retried with `retries`."""
    pause, retries = threading.Event(), retries or RetryPolicy()
    job = reader.job(job_id)
    while True:
        yield job
        if is_final(job.state):
            return
        pause.wait(poll_seconds)
        job = retries.call(lambda: reader.job(job_id))


def _follow_plainly(
    reader: JobReader, job_id: str, console: Console, poll_seconds: float, on_progress: Callable[[Job], None]
) -> Job:
    last_state, printed_at = "", 0.0
    for job in watch(reader, job_id, poll_seconds, _printing_retries(console)):
        now = time.monotonic()
        if job.state != last_state or now - printed_at >= PLAIN_SECONDS:
            console.print(progress_line(job), markup=False, highlight=False, soft_wrap=True)
            last_state, printed_at = job.state, now
        on_progress(job)
    return job
