"""The job database: `Store` for connections, one module of queries a table."""

from service.store.database import Store
from service.store.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidCursor,
    JobBeingDeleted,
    JobChanged,
    JobNotFinal,
    JobNotFound,
    OutcomeUnknown,
    StoreOfNewerRelease,
    StoreUnusable,
)
from service.store.paging import Page
from service.store.tables import Checkpoint, Event, Generation, Job, Metric, Rank, Recovery, StateChange

__all__ = [
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
    "Metric",
    "OutcomeUnknown",
    "Page",
    "Rank",
    "Recovery",
    "StateChange",
    "Store",
    "StoreOfNewerRelease",
    "StoreUnusable",
]
