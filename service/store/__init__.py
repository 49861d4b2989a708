"""The job database: `Store` for connections, one module of queries a table."""

from service.store.access_tables import ApiKey, AuditEntry, Project
from service.store.database import Store
from service.store.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidCursor,
    JobBeingDeleted,
    JobChanged,
    JobNotFinal,
    JobNotFound,
    KeyNotFound,
    LinkNotGood,
    OutcomeUnknown,
    ProjectExists,
    ProjectNotFound,
    StoreOfNewerRelease,
    StoreUnusable,
    TooManyLabels,
)
from service.store.paging import Page
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

__all__ = [
    "ApiKey",
    "AuditEntry",
    "Checkpoint",
    "Event",
    "Generation",
    "IdempotencyConflict",
    "IllegalTransition",
    "InvalidCursor",
    "Job",
    "JobBeingDeleted",
    "JobChanged",
    "JobNotFinal",
    "JobNotFound",
    "KeyNotFound",
    "LinkNotGood",
    "Metric",
    "OutcomeUnknown",
    "Page",
    "Project",
    "ProjectExists",
    "ProjectNotFound",
    "Rank",
    "Recovery",
    "StateChange",
    "Store",
    "StoreOfNewerRelease",
    "StoreUnusable",
    "TooManyLabels",
]
