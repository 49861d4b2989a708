"""Specs as they are stored, and how a release reads what another one has stored.

`jobs.spec` is the checked spec with all defaults filled in, so that a job does not change when defaults do. A release
that does not know one of its keys can ignore that key if it carries no choice: the user did not write it
(`jobs.submitted`), and its value is the default of the release that stored it (it is not in `jobs.not_default`). New
keys have defaults that do what was done before, so nothing is lost. In all other cases the spec is not understood, and
the job is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from manta.service.errors import ErrorKind, ServiceError
from manta.service.store.tables import Job
from manta.workers.config import JobSpec
from manta.workers.system.threads import BEFORE

Document = Mapping[str, Any]


class SpecNotUnderstood(ServiceError):
    """Another release stored the spec, and this one does not accept it; the message says what to do."""

    kind = ErrorKind(
        "not_understood", 409, "another release stored the job's spec, and this one does not understand it"
    )

    def __init__(self, error: ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the spec"
        more = f" and {error.error_count() - 1} more problems" if error.error_count() > 1 else ""
        super().__init__(
            f"this release of Manta does not take the stored spec: {where}: {first['msg']}{more}; a release that does "
            "continues the job, or cancel it and submit it again"
        )


@dataclass(frozen=True)
class StoredSpec:
    """A stored spec as this release reads it."""

    spec: JobSpec
    left_out: tuple[str, ...] = ()
    """Dotted paths of the keys that this release does not know."""


def as_written(spec: JobSpec) -> dict[str, Any]:
    """The part of `spec` that the user wrote, as JSON, without anything that was filled in."""
    return spec.model_dump(mode="json", exclude_unset=True)


def not_default(spec: JobSpec) -> dict[str, Any]:
    """The part of `spec` that differs from this release's defaults, as JSON."""
    return spec.model_dump(mode="json", exclude_defaults=True)


def stored_spec(job: Job) -> StoredSpec:
    """The spec of `job`. Raises SpecNotUnderstood."""
    document = _with_threads(_without_removed(job.spec))
    left_out: list[str] = []
    while True:
        try:
            return StoredSpec(JobSpec.model_validate(document), tuple(left_out))
        except ValidationError as error:
            unknown = _unknown_keys(error, document)
            said = (job.submitted, job.not_default)
            if not unknown or any(each is None or _holds(each, path) for path in unknown for each in said):
                raise SpecNotUnderstood(error) from error
            for path in unknown:
                document = _without(document, path)
                left_out.append(".".join(path))


def left_out_sentence(left_out: tuple[str, ...]) -> str:
    """The sentence about keys that this release ignores."""
    keys = ", ".join(sorted(left_out))
    return f"this release of Manta does not know {keys} of the spec, with the defaults of its release: it goes without"


def _without_removed(document: Document) -> Document:
    """`document` without the keys of earlier releases that never had an effect."""
    model = document.get("model")
    if isinstance(model, Mapping) and model.get("experts", 0) is None:
        return _without(document, ("model", "experts"))
    return document


def _with_threads(document: Document) -> dict[str, Any]:
    """`document` with the number of threads that its job computes with: releases that did not store one offered no
    choice, and a job that began under such a release keeps its bits."""
    resources = document.get("resources") or {}
    if not isinstance(resources, Mapping) or "threads" in resources:
        return dict(document)
    return {**document, "resources": {**resources, "threads": BEFORE}}


def _unknown_keys(error: ValidationError, document: Document) -> list[tuple[str, ...]]:
    """Paths of the unknown keys."""
    return [
        _path_in(document, item["loc"]) for item in error.errors(include_url=False) if item["type"] == "extra_forbidden"
    ]


def _path_in(document: Document, location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Where pydantic's `location` is in `document`: it also contains names of union members, which are not keys."""
    path: list[str] = []
    inner: Any = document
    for part in location:
        if isinstance(inner, Mapping) and isinstance(part, str) and part in inner:
            path.append(part)
            inner = inner[part]
    return tuple(path)


def _holds(document: Document, path: tuple[str, ...]) -> bool:
    """Whether there is anything at `path`."""
    inner: Any = document
    for part in path:
        if not isinstance(inner, Mapping) or part not in inner:
            return False
        inner = inner[part]
    return True


def _without(document: Document, path: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = path
    if rest:
        return {**document, first: _without(document[first], tuple(rest))}
    return {key: value for key, value in document.items() if key != first}
