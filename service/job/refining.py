"""The machines of a cluster, with constants refined by the steps of jobs.

They are derived from the plans and measurements in the database each time, so that all control planes refine alike and
nothing has to be kept up to date; without a service, `manta plan` uses calibrations only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.orm import Session

from service.planner.hardware import Cluster, Machine
from service.planner.machines import BadCalibration, jobs_since, machine_of_type, type_of
from service.planner.refinement import Observation, refined
from service.store import plans


@dataclass(frozen=True)
class SeenJobs:
    """What jobs say about machines."""

    by_type: dict[str, list[Observation]]
    """Newest first, by `service.planner.machines.type_of`."""

    @classmethod
    def read(cls, session: Session, folder: Path) -> SeenJobs:
        """From the jobs in the database. `folder`: of the calibrations, which also records since when jobs count."""
        return cls(plans.observed(session, jobs_since(folder)))

    def machine(self, machine: Machine) -> Machine:
        """`machine` as refined by jobs."""
        return refined(machine, self.by_type.get(type_of(machine), ()))

    def of_type(self, name: str, folder: Path) -> Machine | None:
        """A machine of that type if jobs have refined it, otherwise None; `folder`: of the calibrations."""
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
        """`cluster` with refined machines of all kinds."""
        others = tuple(self.cluster(other) for other in cluster.others)
        return replace(cluster, machine=self.machine(cluster.machine), others=others)
