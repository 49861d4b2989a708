"""What a user may change of a job after its submission."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from service.store import events, jobs
from service.store.errors import JobChanged
from service.store.tables import Job


def version_of(job: Job | Row[Any]) -> str:
    """Another one whenever something has changed that `edit` can change; the progress of a job does not count."""
    return hashlib.sha256(json.dumps([job.id, job.name, job.priority]).encode()).hexdigest()[:16]


def edit(
    session: Session,
    job_id: str,
    name: str | None = None,
    priority: int | None = None,
    expected: Collection[str] | None = None,
) -> Job:
    """Change a job's name or priority, in its spec too; None leaves it as it is. `expected`: only if its version is one
    of these.

    Raises JobNotFound, JobChanged.
    """
    job = jobs.get(session, job_id, lock=True)
    if expected is not None and version_of(job) not in expected:
        raise JobChanged(job_id, version_of(job))
    before: dict[str, Any] = {"name": job.name, "priority": job.priority}
    wanted = {"name": name, "priority": priority}
    new = {key: value for key, value in wanted.items() if value is not None and value != before[key]}
    if not new:
        return job
    for key, value in new.items():
        setattr(job, key, value)
    job.spec, job.updated_at = {**job.spec, **new}, time.time()
    job.submitted = None if job.submitted is None else {**job.submitted, **new}
    job.not_default = None if job.not_default is None else {**job.not_default, **new}
    sentence = " and ".join(f"{key} from {before[key]!r} to {value!r}" for key, value in new.items())
    data = {key: {"from": before[key], "to": value} for key, value in new.items()}
    about: dict[str, Any] = {"generation": job.generation, "step": job.step}
    events.append(session, job_id, "edited", f"the user changed {sentence}", data=data, **about)
    return job
