"""Events about a step that people read: printed into rank 0's log, and reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.comm.comm import Comm
from workers.training.reporter import Reporter


def announce(comm: Comm, reporter: Reporter, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
    """On rank 0, print `message` and report it as an event."""
    if comm.rank == 0:
        print(message, flush=True)
        reporter.event(kind, step, message, data)


def named_samples(samples: Sequence[range]) -> str:
    """The samples of a step as text, such as `32 to 47`."""
    return " and ".join(f"{each.start} to {each.stop - 1}" for each in samples)


def sample_data(samples: Sequence[range]) -> dict[str, Any]:
    """The samples of a step as an event's data: the first and the last, and [first, one past the last] of each
    range."""
    return {
        "first_sample": samples[0].start,
        "last_sample": samples[-1].stop - 1,
        "samples": [[each.start, each.stop] for each in samples],
    }
