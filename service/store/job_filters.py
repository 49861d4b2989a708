"""Filter, order and page beginning of a list of jobs, as parts of statements for `job_rows.py`. Statements are built
once for each combination, since building takes longer than running."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Double,
    String,
    and_,
    bindparam,
    case,
    func,
    or_,
    select,
    tuple_,
    type_coerce,
)

from service.ids import is_job_id
from service.states import UNFINISHED, JobState
from service.store.errors import InvalidCursor
from service.store.paging import Cursors
from service.store.tables import Job, JobLabel
from service.store.types import storable

Sort = Literal["created", "name", "state", "step", "loss", "priority", "finished"]
_COLUMNS = Job.__table__.columns
_LABELS = JobLabel.__table__.columns
_LARGEST_INTEGER = 2**63 - 1


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
_MAY_BE_UNKNOWN: frozenset[Sort] = frozenset({"finished", "loss"})
_TYPES: dict[Sort, Any] = {
    **dict.fromkeys(("name", "state"), String()),
    **dict.fromkeys(("step", "priority"), BigInteger()),
    **dict.fromkeys(("finished", "loss"), Double()),
}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value in a client's cursor can be compared with values of that kind."""
    if isinstance(kind, String):
        return isinstance(value, str)
    if isinstance(kind, BigInteger):
        return type(value) is int and abs(value) <= _LARGEST_INTEGER
    return type(value) in (int, float) and math.isfinite(value)


def _escaped(text: str) -> str:
    """`text` escaped for use in a LIKE pattern."""
    return "".join(f"/{letter}" if letter in "/%_" else letter for letter in text)
