"""All queries about durable checkpoints."""

from __future__ import annotations

import time

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from manta.service.states import JobState
from manta.service.store import jobs
from manta.service.store.errors import CheckpointNotFound, InvalidCursor
from manta.service.store.paging import Cursors, Page
from manta.service.store.tables import Checkpoint, Job
from manta.workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, checkpoint_path

SAVING, COMPLETE, FAILED, DELETED = "saving", "complete", "failed", "deleted"


def begin(session: Session, job_id: str, generation: int, step: int, path: str) -> Checkpoint | None:
    """Record that `generation` saves the state of committed step `step` in folder `path`. Saving the same step again in
    the same generation replaces the earlier attempt. Returns None if the job is in a higher generation. Raises
    JobNotFound."""
    if generation < jobs.get(session, job_id, lock=True).generation:
        return None
    checkpoint_id = _id(job_id, step, generation)
    row = session.get(Checkpoint, checkpoint_id) or Checkpoint(id=checkpoint_id, job_id=job_id)
    row.generation, row.step, row.state, row.path = generation, step, SAVING, path
    row.created_at, row.completed_at, row.bytes = time.time(), None, None
    session.add(row)
    session.flush()
    return row


def complete(session: Session, checkpoint_id: str, size_bytes: int) -> bool:
    """Record that a checkpoint's manifest is written; `size_bytes` is its size on disk. Returns False, without any
    change, if it is unknown, deleted or already complete. A failed one becomes complete too, since a store may answer
    when nothing waits for it any more. Checkpoints of lower generations count as well, since they are complete on disk,
    so this is not fenced."""
    row = session.get(Checkpoint, checkpoint_id)
    if row is None or row.state not in (SAVING, FAILED):
        return False
    row.state, row.bytes, row.completed_at = COMPLETE, size_bytes, time.time()
    return True


def fail(session: Session, checkpoint_id: str) -> bool:
    """Record that saving a checkpoint failed. Returns False if it was not being saved."""
    row = session.get(Checkpoint, checkpoint_id)
    if row is None or row.state != SAVING:
        return False
    row.state = FAILED
    return True


def mark_deleted(session: Session, checkpoint_id: str) -> bool:
    """Record that a checkpoint's files are gone. Returns False if it is unknown."""
    row = session.get(Checkpoint, checkpoint_id)
    if row is None:
        return False
    row.state = DELETED
    return True


def get(session: Session, job_id: str, checkpoint_id: str) -> Checkpoint:
    """A checkpoint of the job. Raises JobNotFound, CheckpointNotFound."""
    jobs.get(session, job_id)
    row = session.get(Checkpoint, checkpoint_id)
    if row is None or row.job_id != job_id:
        raise CheckpointNotFound(job_id, checkpoint_id)
    return row


def newest(session: Session, job_id: str) -> Checkpoint | None:
    """The complete checkpoint that was created last, from which the job would continue; None if there is none."""
    query = select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state == COMPLETE)
    return session.scalar(query.order_by(Checkpoint.generation.desc(), Checkpoint.step.desc()).limit(1))


def find(session: Session, job_id: str, generation: int, step: int) -> Checkpoint | None:
    """The checkpoint of `step` by `generation`; None if there is none."""
    query = select(Checkpoint).where(
        Checkpoint.job_id == job_id, Checkpoint.generation == generation, Checkpoint.step == step
    )
    return session.scalars(query).one_or_none()


def page(session: Session, job_id: str, limit: int = 100, cursor: str | None = None) -> Page[Checkpoint]:
    """A job's checkpoints, those of the highest step first. Raises InvalidCursor."""
    cursors = Cursors("checkpoints", job=job_id)
    order = tuple_(Checkpoint.step, Checkpoint.generation)
    query = select(Checkpoint).where(Checkpoint.job_id == job_id)
    if cursor is not None:
        query = query.where(order < tuple_(*_position(cursors.decode(cursor))))
    query = query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc()).limit(limit + 1)
    return Page.of(list(session.scalars(query)), limit, cursors, lambda row: f"{row.step} {row.generation}")


def complete_ones(session: Session, job_id: str) -> list[Checkpoint]:
    """All complete checkpoints of a job, those of the highest step first; `checkpoint.keep` counts these."""
    query = select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state == COMPLETE)
    return list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc())))


def saved_or_saving(session: Session, job_id: str) -> list[Checkpoint]:
    """A job's checkpoints that are complete, or being saved, in order of creation."""
    query = select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state.in_((SAVING, COMPLETE)))
    return list(session.scalars(query.order_by(Checkpoint.generation, Checkpoint.step)))


def under_way(session: Session, job_id: str) -> list[tuple[str, float]]:
    """(Id, beginning) of each of the job's checkpoints that is being saved, as reported."""
    query = select(Checkpoint.id, Checkpoint.created_at)
    rows = session.execute(query.where(Checkpoint.job_id == job_id, Checkpoint.state == SAVING))
    return [(row.id, row.created_at) for row in rows]


def kept_because(session: Session, job: Job) -> dict[str, str]:
    """Why complete checkpoints of a job are kept, as sentences by id, as far as known."""
    made_last_first = sorted(complete_ones(session, job.id), key=lambda row: (row.generation, row.step), reverse=True)
    checkpoint = job.spec.get("checkpoint")
    keep = checkpoint.get("keep") if isinstance(checkpoint, dict) else None
    sentences = {
        row.id: f"among the newest {keep} (checkpoint.keep)"
        for row in made_last_first[: keep if isinstance(keep, int) else 0]
    }
    if made_last_first:
        over = job.state == JobState.SUCCEEDED
        newest = "final state" if over else "newest: the job continues from it"
        sentences[made_last_first[0].id] = newest
    return sentences


def latest_seconds(session: Session, job_id: str, limit: int) -> list[float]:
    """Durations of the last `limit` saves of a job that were completed."""
    query = select(Checkpoint.created_at, Checkpoint.completed_at).where(
        Checkpoint.job_id == job_id, Checkpoint.completed_at.is_not(None)
    )
    rows = session.execute(query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc()).limit(limit))
    return [max(0.0, row.completed_at - row.created_at) for row in rows]


def reconcile(session: Session, job_id: str, listing: Listing) -> None:
    """Update the rows to match the job's folder as far as it is known: a save may have ended without any report, and
    a database that was restored from a backup lacks what was saved since. Unreadable checkpoints, and folders with
    names that no save gives, change no rows. Only for a job whose gang is at rest."""
    rows = list(session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)))
    saved = {row.path for row in rows if row.state == COMPLETE}
    sizes = {str(path): manifest.bytes for path, manifest in listing.complete}
    for row in rows:
        condition, _ = listing.condition_of(row.path, saved)
        if condition is Condition.COMPLETE and row.state in (SAVING, FAILED):
            complete(session, row.id, sizes[row.path])
        elif condition is Condition.COMPLETE and row.state == DELETED:
            row.state = COMPLETE  # it was restored
        elif condition is Condition.INCOMPLETE and row.state in (SAVING, COMPLETE):
            row.state = FAILED if row.state == SAVING else DELETED
    known, now = {row.id for row in rows}, time.time()  # when they were saved is not known
    for checkpoint in listing.checkpoints:
        checkpoint_id = _id(job_id, checkpoint.step, checkpoint.generation)
        if checkpoint.manifest is not None and checkpoint_id not in known and _is_named_by_a_save(listing, checkpoint):
            about = {"generation": checkpoint.generation, "step": checkpoint.step, "path": str(checkpoint.path)}
            done = {"state": COMPLETE, "bytes": checkpoint.manifest.bytes, "created_at": now}
            session.add(Checkpoint(id=checkpoint_id, job_id=job_id, **about, **done))


def _is_named_by_a_save(listing: Listing, each: ListedCheckpoint) -> bool:
    """Whether its name is the only one for its step and generation (not one with more zeros, given by hand), and both
    have their place in the table."""
    fits = each.step < 2**63 and each.generation < 2**31
    return fits and each.path == checkpoint_path(listing.folder, each.step, each.generation)


def _id(job_id: str, step: int, generation: int) -> str:
    return f"ckpt_{job_id.removeprefix('job_')}_{step}_{generation}"


def _position(text: str) -> tuple[int, int]:
    parts = text.split(" ")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise InvalidCursor
    return int(parts[0]), int(parts[1])
