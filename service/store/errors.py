"""Errors of the job database, in sentences that say what to do next."""

from __future__ import annotations

from sqlalchemy.exc import OperationalError

from manta.service.errors import ErrorKind, InvalidParameter, ServiceError
from manta.service.ids import is_job_id
from manta.service.states import ACTIONS, ADVICE, TRANSITIONS, JobState
from manta.workers.errors import MantaError


class JobNotFound(ServiceError):
    """No job has this id."""

    kind = ErrorKind("job_not_found", 404, "there is no such job")

    def __init__(self, job_id: str):
        if is_job_id(job_id):
            super().__init__(f"there is no job {job_id!r}; `manta ps` lists the jobs")
        else:
            super().__init__(f"{job_id[:100]!r} is not a job's id; GET /v1/jobs?name=NAME finds ids by name")


class IllegalTransition(ServiceError):
    """A job's state does not allow the operation; the message names the state, and says why or what to do."""

    kind = ErrorKind("illegal_transition", 409, "the job's state does not allow it")

    def __init__(self, job_id: str, state: JobState, *, target: JobState | None = None, action: str | None = None):
        if action is not None:
            legal, advice = tuple(ACTIONS[action]), ADVICE.get((action, state))
            rule = f"; {action} works only while it is {legal[0]}" if len(legal) == 1 else ""
            super().__init__(f"{job_id} is {state}{rule}" + (f": {advice}" if advice else ""))
        else:
            exits = ", ".join(sorted(TRANSITIONS[state])) or "nothing, it is final"
            super().__init__(f"{job_id} is {state} and cannot become {target}; what may follow: {exits}")


class JobNotFinal(ServiceError):
    """A job that is not final cannot be deleted."""

    kind = ErrorKind("job_not_final", 409, "the job has not ended: cancel it first")

    def __init__(self, job_id: str, state: JobState):
        super().__init__(
            f"{job_id} is {state}, and only a job that has ended can be deleted: cancel it first "
            f"(`manta cancel {job_id}`), and delete it once it is {JobState.CANCELLED}"
        )


class JobBeingDeleted(ServiceError):
    """The deletion of a job has begun, so nothing else can be done with it."""

    kind = ErrorKind("job_being_deleted", 409, "the job is being deleted")

    def __init__(self, job_id: str):
        super().__init__(f"{job_id} is being deleted, and part of it may be gone: finish that with `manta delete`")


class JobBeingExported(ServiceError):
    """Weights of a job are being exported, so it cannot be deleted yet."""

    kind = ErrorKind("job_being_exported", 409, "weights of the job are being exported")

    def __init__(self, job_id: str):
        super().__init__(f"a checkpoint of {job_id} is being exported: delete the job once that is done")


class JobChanged(ServiceError):
    """A job has changed since the caller that changes it has read it."""

    kind = ErrorKind("precondition_failed", 412, "the job has changed since the version that If-Match names")

    def __init__(self, job_id: str, version: str):
        super().__init__(
            f"{job_id} has changed since it was read (its version is {version} now): read it again, "
            "and repeat the change if it still makes sense"
        )


class TraceNotFound(ServiceError):
    """A job has no such trace."""

    kind = ErrorKind("trace_not_found", 404, "the job has no such trace, or nothing was recorded for it")

    def __init__(self, job_id: str):
        super().__init__(f"{job_id} has no such trace, or not any more; `manta traces {job_id}` lists those it has")


class TraceNotPossible(ServiceError):
    """A trace of the job cannot be made; the message says why."""

    kind = ErrorKind("trace_not_possible", 409, "the trace cannot be recorded")


class IdempotencyConflict(ServiceError):
    """An idempotency key was used before with another body."""

    kind = ErrorKind("idempotency_conflict", 409, "the Idempotency-Key was used before with another body")

    def __init__(self, key: str, job_id: str):
        super().__init__(
            f"Idempotency-Key {key!r} was used before for {job_id} with another body; use a new key for a new job"
        )


class CheckpointNotFound(ServiceError):
    """No checkpoint of the job has this id."""

    kind = ErrorKind("checkpoint_not_found", 404, "the job has no such checkpoint")

    def __init__(self, job_id: str, checkpoint_id: str):
        super().__init__(
            f"{job_id} has no checkpoint {checkpoint_id[:100]!r}; `manta checkpoints {job_id} --json` lists their ids"
        )


class ExportNotFound(ServiceError):
    """No export of the job has this id."""

    kind = ErrorKind("export_not_found", 404, "the job has no such export")

    def __init__(self, job_id: str, export_id: str):
        super().__init__(f"{job_id} has no export {export_id[:100]!r}")


class TooManyLabels(InvalidParameter):
    """A job would have more labels than any may have."""

    field = "labels"

    def __init__(self, count: int, most: int):
        super().__init__(f"the job would have {count} labels, and may have {most}: remove some by setting them to null")


class InvalidCursor(InvalidParameter):
    """A page cursor that this release of the service did not make."""

    field = "cursor"

    def __init__(
        self, message: str = "the cursor was not issued by this release of Manta; start again without one"
    ) -> None:
        super().__init__(message)


class ForeignCursor(InvalidCursor):
    """A page cursor of another list, or of the same one under another filter."""

    def __init__(self) -> None:
        super().__init__(
            "the cursor belongs to another list, or to this one with another filter; repeat the request that gave it "
            "out, or start again without a cursor"
        )


class ProjectNotFound(ServiceError):
    """No project has this name, or the caller may not see it."""

    kind = ErrorKind("project_not_found", 404, "there is no such project")

    def __init__(self, name: str):
        super().__init__(f"there is no project {name[:100]!r}; `manta projects list` lists the projects")


class ProjectExists(ServiceError):
    """A project of this name exists already."""

    kind = ErrorKind("project_exists", 409, "there is a project of this name already")

    def __init__(self, name: str):
        super().__init__(f"there is a project {name!r} already; choose another name")


class KeyNotFound(ServiceError):
    """No API key has this id, or the caller may not see it."""

    kind = ErrorKind("key_not_found", 404, "there is no such key")

    def __init__(self, key_id: str):
        super().__init__(f"there is no key {key_id[:100]!r}; `manta keys list` lists the keys")


class LinkInvalid(ServiceError):
    """A one-time link that was used, has expired, or never existed."""

    kind = ErrorKind("link_not_good", 404, "the link was used before, has expired or was never issued")

    def __init__(self) -> None:
        super().__init__("this link was used before, has expired or was never issued; `manta link` prints a new one")


class StoreUnusable(MantaError):
    """The database cannot be opened or brought up to date."""

    def __init__(self, location: str, cause: Exception, advice: str | None = None):
        """`location`: without a password; `advice`: possible remedy."""
        why = " ".join(str(getattr(cause, "orig", None) or cause).split())
        super().__init__(f"cannot use the database {location}: {why}" + (f" ({advice})" if advice else ""))


class StoreEmpty(StoreUnusable):
    """There is no job database to read."""


class OutcomeUnknown(OperationalError):
    """The connection to the database was lost during a commit, and the database does not say either whether the commit
    was made. Operations that may be repeated are repeated."""


class DatabaseLost(OperationalError):
    """The file of the database is not the one that was opened: it was moved, removed, replaced or emptied. It may come
    back."""

    def __init__(self, problem: str):
        """`problem`: names the file."""
        super().__init__(None, None, FileNotFoundError(problem))


class StoreOfNewerRelease(StoreUnusable):
    """A newer release has brought the database to a schema that this one cannot use."""

    def __init__(self, location: str, theirs: str, ours: str):
        """`theirs`: revision of the schema; `ours`: the newest that this release knows."""
        super().__init__(
            location,
            ValueError(
                f"a newer release of Manta has brought it to revision {theirs}, and this one knows them up to {ours}: "
                "start that release or a later one, or put the copy back that it made (docs/operations.md, Upgrades)"
            ),
        )
