"""The job database: `Store` for connections, and one module of queries per table."""

from manta.service.store.database import Store
from manta.service.store.installation_tables import ApiKey, AuditEntry, Lease, Project
from manta.service.store.paging import Page
from manta.service.store.step_traces import StepTrace
from manta.service.store.tables import Checkpoint, Event, Generation, Job, Metric, Rank, Recovery, StateChange
