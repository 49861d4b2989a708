"""What everything that acts for one running job shares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.cluster.sizes import in_use
from service.job.crew import Crew, Joiners
from service.job.incident import Incident
from service.job.record import JobRecord
from service.job.site import Site
from service.recovery.budgets import Fault, faults_of
from service.store.tables import Generation, Job
from workers.config import JobSpec


@dataclass
class JobContext:
    """One running job: what was asked for, its rows, its agents, and what others want of it."""

    site: Site
    submitted: JobSpec
    record: JobRecord
    crew: Crew
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """The user wants it to end."""
    change_possible: asyncio.Event = field(default_factory=asyncio.Event)
    """Its size or place may have to change, or be able to."""
    departing: list[Joiners] = field(default_factory=list)
    """No longer of the gang, to be sent away; their nodes may hold the state that the next generation needs."""
    failed_launches: list[Fault] = field(default_factory=list)
    """Since the last launch that did not fail: such failures have no rows."""
    stragglers_replaced: dict[int, float] = field(default_factory=dict)
    """When each rank was last replaced as a straggler, Unix seconds."""

    @classmethod
    def of(cls, site: Site, job: Job) -> JobContext:
        """The context of `job`. Raises ValidationError where its stored spec is no longer taken."""
        submitted = JobSpec.model_validate(job.spec)
        return cls(site, submitted, JobRecord(site.store, job.id), Crew(site.gangs, job.id, in_use(submitted, job)))

    @property
    def id(self) -> str:
        """The job's."""
        return self.record.id

    async def wanted_replicas(self) -> int:
        """The number of replicas that the user wants."""
        return (await self.record.job()).wanted_replicas or self.submitted.layout.data

    def failures(self, lives: Sequence[Generation], incident: Incident | None = None) -> list[Fault]:
        """What the job has survived: `lives` are its generations; `incident` made the launch necessary that is to be
        tried again, and has no row either."""
        known = [*faults_of(lives), *self.failed_launches]
        if incident is not None and incident.fault not in known:
            known.append(incident.fault)
        return known
