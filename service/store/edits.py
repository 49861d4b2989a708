"""What a user may change in a job after its submission."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from manta.service.store import events, jobs
from manta.service.store.errors import JobChanged, TooManyLabels
from manta.service.store.tables import Job
from manta.workers.config import MAX_LABELS


def labels_of(job: Job | Row[Any]) -> dict[str, str]:
    """The labels of a job; none in a spec of a release without labels."""
    return dict(job.spec.get("labels") or {})


def version_of(job: Job | Row[Any]) -> str:
    """Changes whenever something changes that `edit` can change; the progress of a job does not count."""
    return hashlib.sha256(json.dumps([job.id, *_editable(job).values()], sort_keys=True).encode()).hexdigest()[:16]


def edit(
    session: Session,
    job_id: str,
    name: str | None = None,
    priority: int | None = None,
    labels: Mapping[str, str | None] | None = None,
    expected: Collection[str] | None = None,
) -> Job:
    """Change a job's name, priority or labels, in its spec too. None leaves a value as it is; labels that are not in
    `labels` stay, and those with None are removed. `expected`: only if the job has one of these versions.

    Raises JobNotFound, JobChanged, TooManyLabels.
    """
    job = jobs.get(session, job_id, lock=True)
    if expected is not None and version_of(job) not in expected:
        raise JobChanged(job_id, version_of(job))
    before = _editable(job)
    wanted: dict[str, Any] = {"name": name, "priority": priority, "labels": _merged(before["labels"], labels or {})}
    new = {key: value for key, value in wanted.items() if value is not None and value != before[key]}
    if not new:
        return job
    job.name, job.priority = new.get("name", job.name), new.get("priority", job.priority)
    if "labels" in new:
        jobs.set_labels(session, job_id, new["labels"])
    job.spec, job.updated_at = {**job.spec, **new}, time.time()
    job.submitted = None if job.submitted is None else {**job.submitted, **new}
    job.not_default = None if job.not_default is None else {**job.not_default, **new}
    sentence = " and ".join(f"{key} from {before[key]!r} to {value!r}" for key, value in new.items())
    data = {key: {"from": before[key], "to": value} for key, value in new.items()}
    about: dict[str, Any] = {"generation": job.generation, "step": job.step}
    events.append(session, job_id, "edited", f"the user changed {sentence}", data=data, **about)
    return job


def _editable(job: Job | Row[Any]) -> dict[str, Any]:
    return {"name": job.name, "priority": job.priority, "labels": labels_of(job)}


def _merged(labels: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`labels` with `changes` (RFC 7396). Raises TooManyLabels."""
    merged = {key: value for key, value in {**labels, **changes}.items() if value is not None}
    if len(merged) > MAX_LABELS:
        raise TooManyLabels(len(merged), MAX_LABELS)
    return merged
