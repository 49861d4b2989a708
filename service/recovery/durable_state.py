"""Which durable checkpoints a job could resume from, and which of them cannot be read now. Pure functions.

A state is chosen as if checkpoints that cannot be read now were readable: if the choice is one of them, the job is held
until it can be read, instead of going further back and losing steps that exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manta.service.tasks import backoff_after
from manta.workers.checkpoint.catalog import Condition, Listing, generation_of
from manta.workers.errors import MantaError
from manta.workers.protocol.messages import Resume

INITIAL_HOLD_SECONDS = 1.0
MAX_HOLD_SECONDS = 30.0


class CheckpointsUnreadable(MantaError):
    """The newest state of a job is a checkpoint that cannot be read now. The message is for the event `held`."""


class SavedCheckpoint(Protocol):
    """The fields of a checkpoint, complete or being saved according to the database, that are read here."""

    generation: int
    step: int
    path: str


class GenerationOrigin(Protocol):
    """The fields of a generation that are read here; its row has them."""

    generation: int
    resume_source: str
    data: dict[str, Any]


@dataclass(frozen=True)
class DurableState:
    """The checkpoints that a job has, as far as known."""

    checkpoints: tuple[tuple[int, str], ...]
    """(Step, path) of the readable and the unreadable ones, in the order in which they were made."""
    unknown: Mapping[str, str]
    """For unreadable ones, by path, the reason."""
    unreported: frozenset[str] = frozenset()
    """Paths of unreadable ones whose save had begun, and may have been completed unheard."""

    def refuse_unknown(self, job_id: str, resume: Resume, has_snapshots: bool = True) -> None:
        """Raise CheckpointsUnreadable if `resume`, chosen among these, is a checkpoint that cannot be read.
        `has_snapshots`: whether the job keeps any."""
        if resume.path is not None and resume.path in self.unknown:
            older = any(path not in self.unknown for _, path in self.checkpoints)
            why = hold_sentence(job_id, resume.step, self.unknown[resume.path], older, has_snapshots)
            raise CheckpointsUnreadable(why)


def durable_state(
    listing: Listing, complete: Sequence[SavedCheckpoint], begun: Sequence[SavedCheckpoint] = ()
) -> DurableState:
    """The combined information of the disk (`listing`) and the database: checkpoints that are `complete`, and those
    whose save has `begun` and ended unheard."""
    listed = [checkpoint for checkpoint in listing.checkpoints if checkpoint.condition is Condition.COMPLETE]
    whole = {str(each.path): (each.generation, each.step) for each in listed}
    reported = {row.path: (row.generation, row.step) for row in (*complete, *begun)}
    saved = {row.path for row in complete}
    unknown = {}
    for path in reported.keys() - whole.keys():
        condition, problem = listing.condition_of(path, saved)
        if condition is Condition.UNKNOWN:
            unknown[path] = problem if path in saved else f"whether its save was completed is unknown, {problem}"
    places = {**whole, **{path: reported[path] for path in unknown}}
    in_order = sorted(places, key=lambda path: places[path])
    found = tuple((places[path][1], path) for path in in_order)
    return DurableState(found, unknown, frozenset(unknown.keys() - saved))


def hold_sentence(job_id: str, step: int, problem: str, older: bool, has_snapshots: bool) -> str:
    """Why the job does not continue, and what would help. `older`: whether another checkpoint can be read;
    `has_snapshots`: whether the job keeps any."""
    no_memory = "" if has_snapshots else " (with checkpoint.snapshots: off no state is in memory)"
    instead = "; to continue from an older checkpoint instead, delete its folder" if older else ""
    return (
        f"on hold: the newest state is the checkpoint of step {step}{no_memory}, which cannot be read now: {problem}. "
        "Mount or move the folder back, or make it readable, and the job continues by itself"
        f"{instead}. manta cancel {job_id} ends it"
    )


def hold_seconds(holds: int) -> float:
    """How long to wait before the next check after `holds` unsuccessful ones."""
    return backoff_after(holds, INITIAL_HOLD_SECONDS, MAX_HOLD_SECONDS)


def beginning_of(resume: Resume, generations: Sequence[GenerationOrigin]) -> int:
    """The generation that began at step 0 and from which the state of `resume` descends; 0 if there is none yet or it
    is not known. `generations`: all so far, in order."""
    rows = {row.generation: row for row in generations}
    number, path = max(rows, default=0), resume.path
    source: str = resume.source
    while source != "start":
        made_by = generation_of(path) if source == "checkpoint" and path is not None else number
        row = rows.get(min(number, made_by or 0))
        if row is None:
            return 0
        if row.resume_source == "start":
            return row.generation
        number, source, path = row.generation - 1, row.resume_source, (row.data or {}).get("resume_path")
    return 0
