"""Displayed data of jobs as plain rows, which are cheap: comparing them shows whether anything has changed, without
parsing them. Lists have a filter, an order and a beginning of their page; statements are built once for each
combination, since building takes longer than running."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Double,
    Row,
    Select,
    String,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    or_,
    select,
    tuple_,
    type_coerce,
)
from sqlalchemy.types import NullType

from manta.service.ids import is_job_id
from manta.service.states import UNFINISHED, JobState
from manta.service.store.errors import InvalidCursor, JobNotFound
from manta.service.store.paging import Cursors, Page
from manta.service.store.tables import Job, JobLabel
from manta.service.store.types import Document, Numbers, storable

Sort = Literal["created", "name", "state", "step", "loss", "priority", "finished"]
_COLUMNS = Job.__table__.columns
_LABELS = JobLabel.__table__.columns
_MAX_INTEGER = 2**63 - 1
_MAY_BE_UNKNOWN: frozenset[Sort] = frozenset({"finished", "loss"})
_TYPES: dict[Sort, Any] = {
    **dict.fromkeys(("name", "state"), String()),
    **dict.fromkeys(("step", "priority"), BigInteger()),
    **dict.fromkeys(("finished", "loss"), Double()),
}
_MAX_STATEMENTS = 256
JobRow = Row[Any]
"""The displayed data of a job as the database has it, with `id` first: equal to another one if nothing displayed has
changed."""
NOT_SHOWN = frozenset(
    {
        *("submitted", "not_default", "report_cursor", "idempotency_key", "body_digest"),
        *("wanted_replicas", "retried_at", "binned_until", "binned_generation"),
    }
)
FOLLOWS = frozenset({"spec"})
"""Displayed columns that only change together with others, by `jobs.edit`. They are as long as all the rest."""


@dataclass(frozen=True)
class JobFilter:
    """Conditions for jobs; an empty or None one filters nothing."""

    states: tuple[str, ...] = ()
    """In one of these states."""
    name: str | None = None
    """With exactly this name."""
    search: str | None = None
    """With this text in the name or the id, ignoring case of ASCII letters."""
    labels: tuple[tuple[str, str | None], ...] = ()
    """With all of these labels; None stands for any value."""
    owner: str | None = None
    """Submitted by this user, or with the key of this name."""
    bound: str | None = None
    """Of this project."""

    def conditions(self) -> list[ColumnElement[bool]]:
        """Conditions for those jobs, with parameters for values: the same for filters of one `shape`."""
        columns = self._columns()
        clauses: list[ColumnElement[bool]] = []
        if self.states:
            clauses.append(columns["state"].in_(bindparam("states", expanding=True)))
        if self.search is not None:
            pattern = func.lower(bindparam("search"))
            clauses.append(
                or_(*(func.lower(column).like(pattern, escape="/") for column in (_COLUMNS.name, _COLUMNS.id)))
            )
        for key, value in (("name", self.name), ("owner", self.owner), ("project", self.bound)):
            if value is not None:
                clauses.append(columns[key] == bindparam(key))
        for place, (_, value) in enumerate(self.labels):
            of_label = [_LABELS.key == bindparam(f"key{place}")]
            of_label += [] if value is None else [_LABELS.value == bindparam(f"value{place}")]
            clauses.append(_COLUMNS.id.in_(select(_LABELS.job_id).where(*of_label)))
        return clauses

    def _columns(self) -> dict[str, ColumnElement[str]]:
        """The columns that are filtered by; those of `_too_many` are kept from using their indexes."""
        off, names = self._too_many(), ("state", "name", "owner", "project")
        return {name: func.coalesce(_COLUMNS[name], "") if name in off else _COLUMNS[name] for name in names}

    def _too_many(self) -> tuple[str, ...]:
        """Columns in which more jobs share a value than in another one that is filtered by, which SQLite does not know:
        the fewest jobs share a name, few are unfinished, and fewer share an owner than a state or a project."""
        if self.name is not None:
            return "state", "owner", "project"
        if self.owner is None:
            return ()
        return ("owner",) if self._not_over else ("state", "project")

    @property
    def _not_over(self) -> bool:
        return bool(self.states) and UNFINISHED.issuperset(self.states)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the parameters in `conditions`."""
        searched = None if self.search is None else f"%{_escaped(storable(self.search))}%"
        given = {"states": list(self.states) or None, "name": self.name, "search": searched, "owner": self.owner}
        given["project"] = self.bound
        for place, (key, value) in enumerate(self.labels):
            given |= {f"key{place}": key, f"value{place}": value}
        return {name: storable(value) for name, value in given.items() if value is not None}

    @property
    def shape(self) -> JobFilter:
        """Equal for all filters with the same `conditions`."""

        def given(value: str | None) -> str | None:
            return None if value is None else ""

        labels = tuple(("", given(value)) for _, value in self.labels)
        states = self.states and (JobState.RUNNING if self._not_over else "",)
        return JobFilter(states, given(self.name), given(self.search), labels, given(self.owner), given(self.bound))


@dataclass(frozen=True)
class JobOrder:
    """The order of a list; jobs that are equal in it are in order of submission, and those without a value come last in
    either direction."""

    sort: Sort = "created"
    descending: bool = True

    def keys(self) -> list[ColumnElement[Any]]:
        """Expressions to order by, each with a direction from `directed`."""
        key = _key(self.sort)
        if key is None:
            return [_COLUMNS.id]
        known = [key.is_not(None) if self.descending else key.is_(None)] if self.sort in _MAY_BE_UNKNOWN else []
        return [*known, key, _COLUMNS.id]

    def directed(self, key: ColumnElement[Any]) -> ColumnElement[Any]:
        """A key as a part of ORDER BY."""
        return key.desc() if self.descending else key.asc()

    def after(self, unknown: bool) -> ColumnElement[bool]:
        """A condition for all jobs that come after the one with the parameters `last_id` and, unless its key is
        `unknown`, `last`."""
        key = _key(self.sort)
        last_id: BindParameter[str] = bindparam("last_id", type_=String())
        later = _COLUMNS.id < last_id if self.descending else _COLUMNS.id > last_id
        if key is None:
            return later
        if unknown:
            return and_(key.is_(None), later)
        here, last = tuple_(key, _COLUMNS.id), tuple_(bindparam("last", type_=_TYPES[self.sort]), last_id)
        behind = here < last if self.descending else here > last
        return or_(behind, key.is_(None)) if self.sort in _MAY_BE_UNKNOWN else behind

    def place_of(self, connection: Connection, job_id: str) -> str:
        """The place of a job in this order, for a cursor; computed by the database, which reads numbers differently
        from Python's JSON."""
        key = _key(self.sort)
        if key is None:
            return job_id
        value = connection.execute(select(key).where(_COLUMNS.id == job_id)).scalar_one_or_none()
        return json.dumps([value, job_id])

    def values_at(self, place: str) -> dict[str, Any]:
        """The parameters of `after` for a place. Raises InvalidCursor."""
        if self.sort == "created":
            if not is_job_id(place):
                raise InvalidCursor
            return {"last_id": place}
        try:
            last, last_id = json.loads(place)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidCursor from error
        if not (isinstance(last_id, str) and is_job_id(last_id)):
            raise InvalidCursor
        if last is None and self.sort in _MAY_BE_UNKNOWN:
            return {"last_id": last_id}
        if not _fits(last, _TYPES[self.sort]):
            raise InvalidCursor
        return {"last_id": last_id, "last": storable(last)}


EVERY_JOB, NEWEST_FIRST = JobFilter(), JobOrder()


def cursors(wanted: JobFilter, order: JobOrder) -> Cursors:
    """Of a list of jobs; they contain a place in the order."""
    given = {
        "state": ",".join(sorted(wanted.states)) or None,
        "name": wanted.name,
        "project": wanted.bound,
        "search": wanted.search,
        "labels": json.dumps(wanted.labels) if wanted.labels else None,
        "owner": wanted.owner,
        "order": None if order == NEWEST_FIRST else f"{order.sort} {order.descending}",
    }
    return Cursors("jobs", **given)


def _key(sort: Sort) -> ColumnElement[Any] | None:
    """The expression by which jobs are ordered before their ids; None: there is none."""
    keys = {"created": None, "loss": _LOSS, "finished": _COLUMNS.finished_at}
    return keys[sort] if sort in keys else _COLUMNS[sort]


def _latest_loss() -> ColumnElement[Any]:
    """The loss among the latest metrics, with non-finite ones as the largest numbers: NaN above all, like everywhere in
    the database."""
    said = type_coerce(_COLUMNS.metrics, JSON())["loss"]
    largest = sys.float_info.max
    words = ((said.as_string() == "nan", largest), (said.as_string() == "inf", largest / 2))
    return case(*words, (said.as_string() == "-inf", -largest), else_=said.as_float())


_LOSS = _latest_loss()


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value in a client's cursor can be compared with values of that kind."""
    if isinstance(kind, String):
        return isinstance(value, str)
    if isinstance(kind, BigInteger):
        return type(value) is int and abs(value) <= _MAX_INTEGER
    return type(value) in (int, float) and math.isfinite(value)


def _escaped(text: str) -> str:
    """`text` escaped for use in a LIKE pattern."""
    return "".join(f"/{letter}" if letter in "/%_" else letter for letter in text)


def _as_stored(column: Any) -> ColumnElement[Any]:
    """A column as the driver returns it; JSON as text."""
    plain = cast(column, Text) if isinstance(column.type, Document | Numbers) else type_coerce(column, NullType())
    return plain.label(column.key)


_UNDERSTOOD = [column for column in Job.__table__.columns if column.key not in NOT_SHOWN]
_SHOWN = [_as_stored(column) for column in _UNDERSTOOD if column.key not in FOLLOWS]
# Built once: building a statement takes longer than running it.
_ONE = select(*_SHOWN).where(Job.__table__.columns.id == bindparam("id"))
_SOME = (
    select(*_UNDERSTOOD)
    .where(Job.__table__.columns.id.in_(bindparam("ids", expanding=True)))
    .order_by(Job.__table__.columns.id.desc())
)


def one(connection: Connection, job_id: str) -> JobRow:
    """The row of a job. Raises JobNotFound."""
    row = connection.execute(_ONE, {"id": job_id}).one_or_none() if is_job_id(job_id) else None
    if row is None:
        raise JobNotFound(job_id)
    return row


def understood(connection: Connection, job_ids: Collection[str]) -> Sequence[Row[Any]]:
    """The rows of these jobs as far as they exist, newest first, with everything that a list displays, with names and
    types as in `jobs.get`."""
    return connection.execute(_SOME, {"ids": list(job_ids)}).all()


def page(
    connection: Connection,
    wanted: JobFilter = EVERY_JOB,
    order: JobOrder = NEWEST_FIRST,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[JobRow]:
    """Rows of the `wanted` jobs. Raises InvalidCursor, ForeignCursor."""
    statement, values = _asked(wanted, order, limit, cursor)
    # In one call: row by row, the threads of other requests would take turns in between.
    rows = connection.execute(statement, values).all()
    return Page.of(list(rows), limit, cursors(wanted, order), lambda row: order.place_of(connection, row.id))


def page_as_text(
    connection: Connection,
    wanted: JobFilter = EVERY_JOB,
    order: JobOrder = NEWEST_FIRST,
    limit: int = 50,
    cursor: str | None = None,
) -> str:
    """The rows of that page as one text, which is equal to another one if nothing displayed has changed. The database
    builds it: for fifty rows the interpreter's lock would be released and taken again fifty times, each time behind the
    threads of other requests. SQLite's JSON has 15 digits of a number, so a time that changed alone by less than 10
    microseconds is not noticed. Raises the errors of `page`."""
    statement, values = _asked(wanted, order, limit, cursor, connection.dialect.name)
    return connection.execute(statement, values).scalar_one() or ""


def counts(connection: Connection, wanted: JobFilter = EVERY_JOB) -> dict[str, int]:
    """Number of `wanted` jobs by state; states without jobs are left out."""
    return {row[0]: row[1] for row in connection.execute(_counted(wanted.shape), wanted.values)}


def moved(connection: Connection, job_ids: Collection[str], bound: str | None = None) -> dict[str, Row[Any]]:
    """For those of these jobs that exist, or are of the project `bound`: id, newest step, generation, and when its row
    last changed, which it does with every row of metrics."""
    columns = Job.__table__.columns
    query = select(columns.id, columns.step, columns.generation, columns.updated_at).where(columns.id.in_(job_ids))
    query = query if bound is None else query.where(columns.project == bound)
    rows: list[Row[Any]] = list(connection.execute(query))
    return {row.id: row for row in rows}


def _asked(
    wanted: JobFilter, order: JobOrder, limit: int, cursor: str | None, dialect: str | None = None
) -> tuple[Select[Any], dict[str, Any]]:
    """A statement and the values of its parameters; with `dialect` for the rows as one text."""
    place = None if cursor is None else cursors(wanted, order).decode(cursor)
    values = {} if place is None else order.values_at(place)
    after = None if place is None else "last" in values
    shape = wanted.shape
    statement = _listed(shape, order, after) if dialect is None else _listed_as_text(shape, order, after, dialect)
    return statement, {**wanted.values, **values, "rows": limit + 1}


@lru_cache(_MAX_STATEMENTS)
def _listed_as_text(shape: JobFilter, order: JobOrder, after: bool | None, dialect: str) -> Select[Any]:
    rows = _listed(shape, order, after).subquery()
    if dialect == "sqlite":
        return select(func.json_group_array(func.json_array(*rows.c)))
    return select(cast(func.json_agg(func.json_build_array(*rows.c)), Text))


@lru_cache(_MAX_STATEMENTS)
def _listed(shape: JobFilter, order: JobOrder, after: bool | None) -> Select[Any]:
    """Jobs of one shape of filter; `after`: only those after a place in the order, and whether the value at that place
    is known."""
    columns, keys = Job.__table__.columns, order.keys()
    chosen = select(columns.id).where(*shape.conditions()).order_by(*map(order.directed, keys))
    chosen = chosen.limit(bindparam("rows"))
    if after is not None:
        chosen = chosen.where(order.after(unknown=not after))
    if order.sort == "created" and shape.search is None:
        return chosen.with_only_columns(*_SHOWN)  # they are read in that order anyway
    # Rows are long: only those that are displayed are read completely.
    page = chosen.add_columns(*(key.label(f"key{place}") for place, key in enumerate(keys))).subquery()
    ordered = (order.directed(page.c[f"key{place}"]) for place in range(len(keys)))
    return select(*_SHOWN).join(page, columns.id == page.c.id).order_by(*ordered)


@lru_cache(_MAX_STATEMENTS)
def _counted(shape: JobFilter) -> Select[Any]:
    state = Job.__table__.columns.state
    return select(state, func.count()).where(*shape.conditions()).group_by(state)
