"""Bins of a job's metrics. A bin represents a range of steps by the one with the highest loss; bins of one level are
equally wide, and FANOUT of them make one of the next. Any part of a series can be drawn with a few bins per point,
however long it is.

Bins are made when their range is complete, in the transaction that stores its last row; if rows below
`Job.binned_until` change, the bins above them are rebuilt in that transaction. Bins contain nothing that is not in the
rows: if bins are missing, the rows are read. Decision 0013.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, case, delete, func, insert, literal, select
from sqlalchemy.orm import Session

from manta.service.store.tables import Generation, Job, Metric, MetricBin

SMALLEST = 8
"""Steps in a bin of level 1."""
FANOUT = 4
BATCH_STEPS = 8192
"""Most steps whose bins one transaction makes, if many are missing: other writes must not wait long."""
_INFINITY = float("inf")


@dataclass(frozen=True)
class Segment:
    """A range of steps, as bins of one level; level 0 is the rows themselves."""

    level: int
    begin: int
    """Index of its first bin."""
    end: int
    """One past the index of its last bin."""


def width(level: int) -> int:
    """Steps in a bin of `level`."""
    return 1 if level == 0 else SMALLEST * FANOUT ** (level - 1)


def widest(steps: int) -> int:
    """The highest level whose bins hold at most `steps` steps, which is at least 1."""
    level = 0
    while width(level + 1) <= steps:
        level += 1
    return level


def segments(begin: int, end: int, binned_until: int, highest: int) -> list[Segment]:
    """The steps from `begin` up to but excluding `end`, in bins of level `highest` and, at both ends, lower levels;
    from `binned_until` on, in rows. Ascending, with each step in one of them."""
    middle = max(begin, min(end, binned_until))
    before, after = list[Segment](), [_segment(0, middle, end)]
    for level in range(highest):
        larger = width(level + 1)
        first, last = -(-begin // larger) * larger, middle // larger * larger
        if first >= last:
            before.append(_segment(level, begin, middle))
            break
        before.append(_segment(level, begin, first))
        after.append(_segment(level, last, middle))
        begin, middle = first, last
    else:
        before.append(_segment(highest, begin, middle))
    return [segment for segment in (*before, *reversed(after)) if segment.begin < segment.end]


def _segment(level: int, begin: int, end: int) -> Segment:
    return Segment(level, begin // width(level), end // width(level))


def by_height(step: Any, loss: Any) -> tuple[Any, ...]:
    """The order of preference of the step that represents a range: those without a loss last, those with a non-finite
    loss first, and of equal ones the first."""
    return loss.is_(None), case((loss == -_INFINITY, _INFINITY), else_=loss).desc(), step


def _members(job_id: str, segment: Segment) -> Any:
    """A query for steps and losses."""
    if segment.level == 0:
        return select(Metric.step, Metric.loss).where(
            Metric.job_id == job_id, Metric.step >= segment.begin, Metric.step < segment.end
        )
    return select(MetricBin.step, MetricBin.loss).where(*_bins(job_id, segment))


def _bins(job_id: str, segment: Segment) -> tuple[ColumnElement[bool], ...]:
    """Conditions for the bins of a segment."""
    of_level = (MetricBin.job_id == job_id, MetricBin.level == segment.level)
    return (*of_level, MetricBin.bin >= segment.begin, MetricBin.bin < segment.end)


def update(session: Session, job: Job, changed: Iterable[int]) -> None:
    """Update the bins after rows of `changed` steps, and new ones, were stored."""
    for level, begin, end in _runs([step for step in changed if step < job.binned_until], job.binned_until):
        _make(session, job.id, Segment(level, begin, end))
    catch_up(session, job)


def catch_up(session: Session, job: Job) -> bool:
    """Make the bins of the next BATCH_STEPS steps without any; returns whether there are more of them."""
    if job.binned_generation < job.generation:
        _invalidate_bins(session, job)
    newest = session.scalar(select(func.max(Metric.step)).where(Metric.job_id == job.id)) or 0
    complete = (newest + 1) // SMALLEST * SMALLEST
    until = min(complete, job.binned_until + BATCH_STEPS)
    level = 1
    while until // width(level) > job.binned_until // width(level):
        _make(session, job.id, Segment(level, job.binned_until // width(level), until // width(level)))
        level += 1
    job.binned_until = max(until, job.binned_until)
    return until < complete


def bins_lag(newest: int, job: Job | Row[Any]) -> bool:
    """Whether many rows of the job, whose newest step is `newest`, are in no bin: another release has stored them, or
    they were restored."""
    return job.binned_generation < job.generation or newest - job.binned_until > BATCH_STEPS


def _invalidate_bins(session: Session, job: Job) -> None:
    """Steps that later generations repeated may have been stored by a release without bins."""
    since = select(func.min(Generation.resume_step)).where(
        Generation.job_id == job.id, Generation.generation > job.binned_generation
    )
    resumed = session.scalar(since)
    if resumed is not None:
        job.binned_until = min(job.binned_until, (resumed + 1) // SMALLEST * SMALLEST)
    job.binned_generation = job.generation


def _runs(steps: Iterable[int], binned_until: int) -> Iterator[tuple[int, int, int]]:
    """The complete bins that contain `steps`, from the lowest level up: level, first bin, and one past the last bin of
    each run."""
    numbers, level = sorted({step // SMALLEST for step in steps}), 1
    while numbers := [number for number in numbers if (number + 1) * width(level) <= binned_until]:
        begin = numbers[0]
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            if following != number + 1:
                yield level, begin, number + 1
                begin = following or 0
        numbers, level = sorted({number // FANOUT for number in numbers}), level + 1


def _make(session: Session, job_id: str, segment: Segment) -> None:
    """Make some bins from those of the level below."""
    wide = width(segment.level)
    session.execute(delete(MetricBin).where(*_bins(job_id, segment)))
    below = _segment(segment.level - 1, segment.begin * wide, segment.end * wide)
    members = _members(job_id, below).subquery()
    number = members.c.step // wide
    place = func.row_number().over(partition_by=number, order_by=by_height(members.c.step, members.c.loss))
    ranked = select(members.c.step, members.c.loss, number.label("bin"), place.label("place")).subquery()
    highest = select(literal(job_id), literal(segment.level), ranked.c.bin, ranked.c.step, ranked.c.loss).where(
        ranked.c.place == 1
    )
    session.execute(insert(MetricBin).from_select(["job_id", "level", "bin", "step", "loss"], highest))
