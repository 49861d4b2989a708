"""Jobs by name: commands and the Python client accept a name that no other job has instead of an id. REST only accepts
ids."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from manta.api import schemas
from manta.api.client.calls import checked_job, no_such_job
from manta.api.client.rest_call import ApiError, Call
from manta.service.ids import is_job_id

MAX_LISTED = 10
"""Maximum number of jobs of one name that a user can choose from."""


def lookup(name: str) -> Call[schemas.Items[schemas.Job]]:
    """The newest jobs with exactly that name, without their specs. Raises ApiError for text that cannot be a name."""
    parameters = {"name": checked_job(name), "limit": MAX_LISTED, "spec": "false"}
    return Call(schemas.Items[schemas.Job], "GET", "/v1/jobs", parameters)


def name_in(call: Call[Any]) -> str | None:
    """The name of the job that a call is about; None if it is about no job, or has the id."""
    return None if call.job is None or is_job_id(call.job) else call.job


def only_one(name: str, called: schemas.Items[schemas.Job]) -> str:
    """The id of the job with that name, of which `called` are the newest. Raises ApiError if there is none, and if
    there are several, with what distinguishes them."""
    if not called.items:
        raise no_such_job(f"no job has the id or the name {name!r}")
    if len(called.items) == 1:
        return called.items[0].id
    lines = [f"  {job.id}  {job.state:<10}  {job.created_at.astimezone():%Y-%m-%d %H:%M:%S}" for job in called.items]
    if called.next_cursor is not None:
        lines.append(f"  and older ones: `manta ps --name '{name}'` lists them")
    several = f"several jobs are called {name!r}: say the id of one, such as {called.items[0].id}"
    problem = schemas.Problem(
        code="ambiguous_name", title="Ambiguous name", status=HTTPStatus.CONFLICT, detail="\n".join([several, *lines])
    )
    raise ApiError(problem)
