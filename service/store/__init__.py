"""The job database: `Store` for connections, and one module of queries per table."""

from service.store.database import Store
from service.store.errors import (
    CheckpointNotFound,
    DatabaseLost,
    ExportNotFound,
    IdempotencyConflict,
    IllegalTransition,
    InvalidCursor,
    JobBeingDeleted,
    JobBeingExported,
    JobChanged,
    JobNotFinal,
    JobNotFound,
    KeyNotFound,
    LinkInvalid,
    OutcomeUnknown,
    ProjectExists,
    ProjectNotFound,
    StoreOfNewerRelease,
    StoreUnusable,
    TooManyLabels,
    TraceNotFound,
    TraceNotPossible,
)
from service.store.installation_tables import ApiKey, AuditEntry, Lease, Project
from service.store.paging import Page
from service.store.step_traces import StepTrace
from service.store.tables import (
    Checkpoint,
    Event,
    Generation,
    Job,
    Metric,
    Rank,
    Recovery,
    StateChange,
)
