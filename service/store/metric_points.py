"""Chooses the rows of a job's metrics that represent its series, and builds the statements that fetch them. These are
built once: building one takes longer than running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Row,
    Select,
    Text,
    bindparam,
    cast,
    func,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.types import NullType

from manta.service.store import metric_bins
from manta.service.store.errors import JobNotFound
from manta.service.store.metric_bins import Segment
from manta.service.store.tables import Job, Metric, MetricBin
from manta.service.store.types import Reader

_MAX_STATEMENTS = 256
_JOB, _METRIC, _BIN = Job.__table__.c, Metric.__table__.c, MetricBin.__table__.c


def _given(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger())


LAST_STEP = 2**63 - 1
"""No step is above this one."""
_BETWEEN = (_METRIC.job_id == bindparam("job"), _METRIC.step > _given("after"), _METRIC.step <= _given("until"))
_EXTENT = select(
    select(func.min(_METRIC.step)).where(*_BETWEEN).scalar_subquery().label("first"),
    select(func.max(_METRIC.step)).where(*_BETWEEN).scalar_subquery().label("last"),
    select(func.max(_METRIC.step)).where(_METRIC.job_id == bindparam("job")).scalar_subquery().label("newest"),
    select(func.count())
    .select_from(select(_METRIC.step).where(*_BETWEEN).limit(_given("most")).subquery())
    .scalar_subquery()
    .label("counted"),
    _JOB.steps,
    _JOB.binned_until,
    _JOB.binned_generation,
    _JOB.generation,
    _JOB.updated_at,
    cast(_JOB.report_cursor, Text).label("report_cursor"),
).where(_JOB.id == bindparam("job"))


Extent = Row[Any]
"""The extent of a job's metrics between two steps, and values in the job's row that change with every stored row: equal
to another one if none of these rows has changed."""


def extent(reader: Reader, job_id: str, after_step: int, max_points: int, until_step: int = LAST_STEP) -> Extent:
    """The extent of the rows above `after_step` and up to `until_step`, counting at most one above `max_points`. Raises
    JobNotFound."""
    about = {"job": job_id, "after": after_step, "until": until_step, "most": max_points + 1}
    row = reader.execute(_EXTENT, about).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return row


@dataclass(frozen=True)
class Points:
    """The rows to be drawn."""

    rows: Sequence[Any]
    """For each its step, and then its columns as the database has them; ascending."""
    is_lagging: bool
    """Whether many of the job's rows are in no bin, see `metric_bins.bins_lag`."""


def points(
    reader: Reader,
    job_id: str,
    columns: tuple[str, ...],
    after_step: int = 0,
    max_points: int = 1000,
    until_step: int = LAST_STEP,
    every: int = 1,
) -> Points:
    """At most `max_points` of the rows above `after_step` and up to `until_step`, chosen as in `metrics.series`. Raises
    JobNotFound."""
    about = {"job": job_id, "after": after_step, "until": until_step}
    known = extent(reader, job_id, after_step, max_points, until_step)
    first, last = known.first or 0, known.last or 0
    is_lagging = metric_bins.bins_lag(known.newest or 0, known)
    if every > 1:
        final = [last] if last == known.steps and last % every else []
        steps = [*_multiples(every, first, last, max(1, max_points - len(final))), *final][-max_points:]
        return Points(reader.execute(_some(columns), {"job": job_id, "steps": steps}).all(), is_lagging)
    if known.counted <= max_points:
        return Points(reader.execute(_all(columns), about).all(), is_lagging)
    ends = {"job": job_id, "first": last if max_points == 1 else first, "last": last}
    if max_points <= 2:
        return Points(reader.execute(_thinned(columns, ()), ends).all(), is_lagging)
    ranges = _Ranges.between(first, last, max_points - 2, known.binned_until)
    query = _thinned(columns, tuple(segment.level == 0 for segment in ranges.segments))
    return Points(reader.execute(query, {**ends, **ranges.values()}).all(), is_lagging)


def _multiples(every: int, first: int, last: int, most: int) -> list[int]:
    """Multiples of `every` between two steps, including the last; if there are more than `most`, multiples of a
    multiple of it."""
    newest = last // every * every
    count = max(0, (newest - first) // every + 1)
    stride = every * -(-count // most) if count else every
    return list(range(newest, max(0, first - 1), -stride))[::-1] if first else []


@dataclass(frozen=True)
class _Ranges:
    """Equal ranges of steps, which begin at bins."""

    width: int
    """Steps in a bin of the widest level that is used."""
    begin: int
    """Index of the first range's first bin of that level."""
    bins: int
    """Number of such bins in a range."""
    segments: list[Segment]
    """Number of their steps."""

    @classmethod
    def between(cls, first: int, last: int, most: int, binned_until: int) -> _Ranges:
        """At most `most` ranges of the steps between `first` and `last`."""
        level = metric_bins.widest(max(1, (last - first - 1) // most))
        wide = metric_bins.width(level)
        begin, end = (first + 1) // wide, (last - 1) // wide + 1
        return cls(wide, begin, -(-(end - begin) // most), metric_bins.segments(first + 1, last, binned_until, level))

    def values(self) -> dict[str, int]:
        """Values of the parameters of `_highest`."""
        values = {"wide": self.width, "first_bin": self.begin, "bins": self.bins}
        for at, segment in enumerate(self.segments):
            values |= {f"begin{at}": segment.begin, f"end{at}": segment.end}
            values |= {f"level{at}": segment.level} if segment.level else {}
        return values


@lru_cache(_MAX_STATEMENTS)
def _all(columns: tuple[str, ...]) -> Select[Any]:
    """All rows."""
    return _drawn(columns).where(*_BETWEEN)


@lru_cache(_MAX_STATEMENTS)
def _some(columns: tuple[str, ...]) -> Select[Any]:
    """The rows of given steps."""
    return _drawn(columns).where(
        _METRIC.job_id == bindparam("job"), _METRIC.step.in_(bindparam("steps", expanding=True))
    )


@lru_cache(_MAX_STATEMENTS)
def _thinned(columns: tuple[str, ...], are_rows: tuple[bool, ...]) -> Select[Any]:
    """The rows at both ends and, for each range, the one with the highest loss. `are_rows`: for each segment whether it
    consists of rows or of bins."""
    steps = [select(_given("first")), select(_given("last"))]
    # No condition on `after`: with IN, SQLite would then scan all rows above instead of looking up the steps.
    kept = union_all(*([_highest(are_rows)] if are_rows else []), *steps)
    return _drawn(columns).where(_METRIC.job_id == bindparam("job"), _METRIC.step.in_(kept))


def _drawn(columns: tuple[str, ...]) -> Select[Any]:
    # As the database has them: processing ten thousand numbers in SQLAlchemy takes longer than fetching them.
    shown = [_METRIC[name] if name == "extra" else type_coerce(_METRIC[name], NullType()) for name in columns]
    return select(_METRIC.step, *shown).order_by(_METRIC.step)


def _highest(are_rows: tuple[bool, ...]) -> Select[Any]:
    """The steps with the highest loss of each range."""
    members = union_all(*(_members(at, is_rows) for at, is_rows in enumerate(are_rows))).subquery()
    number = (members.c.step // _given("wide") - _given("first_bin")) // _given("bins")
    place = func.row_number().over(partition_by=number, order_by=metric_bins.by_height(members.c.step, members.c.loss))
    ranked = select(members.c.step, place.label("place")).subquery()
    return select(ranked.c.step).where(ranked.c.place == 1)


def _members(at: int, is_rows: bool) -> Select[Any]:
    begin, end = _given(f"begin{at}"), _given(f"end{at}")
    if is_rows:
        return select(_METRIC.step, _METRIC.loss).where(
            _METRIC.job_id == bindparam("job"), _METRIC.step >= begin, _METRIC.step < end
        )
    return select(_BIN.step, _BIN.loss).where(
        _BIN.job_id == bindparam("job"), _BIN.level == _given(f"level{at}"), _BIN.bin >= begin, _BIN.bin < end
    )
