"""The machines of a cluster as the steps of jobs have refined what is assumed of them.

That is derived from the plans and measurements in the database each time, so that all control planes refine alike and
nothing has to be kept up to date; without a service, `manta plan` uses calibrations alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.orm import Session

from service.machines import BadCalibration, jobs_since, machine_of_type, type_of
from service.planner.hardware import Cluster, Machine
from service.planner.refinement import Observation, refined
from service.store import plans


@dataclass(frozen=True)
class SeenJobs:
    """What jobs say of machines."""

    by_type: dict[str, list[Observation]]
    """Newest first, by `service.machines.type_of`."""

    @classmethod
    def read(cls, session: Session, folder: Path) -> SeenJobs:
        """Of the jobs in the database. `folder`: of the calibrations, where it is noted since when they count."""
        return cls(plans.observed(session, jobs_since(folder)))

    def machine(self, machine: Machine) -> Machine:
        """As jobs have refined it."""
        return refined(machine, self.by_type.get(type_of(machine), ()))

    def of_type(self, name: str, folder: Path) -> Machine | None:
        """A machine of that type, where jobs have refined it; `folder`: of the calibrations."""
        try:
            machine = machine_of_type(folder, name)
        except BadCalibration:
            return None
        refined = machine and self.machine(machine)
        return refined if refined and refined.refined else None

    def newest(self, name: str) -> float:
        """When the newest job on such a machine began, Unix seconds."""
        return max(each.at for each in self.by_type[name])

    def cluster(self, cluster: Cluster) -> Cluster:
        """With its machines refined, of all kinds."""
        others = tuple(self.cluster(other) for other in cluster.others)
        return replace(cluster, machine=self.machine(cluster.machine), others=others)
