"""Plans for a cluster that is described, made in this process: no service is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manta.api.schemas import Plans
from manta.service.planner.answer import to_json
from manta.service.planner.hardware import Cluster
from manta.service.planner.machines import measured_machines, this_node
from manta.service.planner.request import read_request
from manta.service.settings import Settings
from manta.workers.paths import Paths
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.submitted import with_shape_of_weights


def plan(document: Mapping[str, Any]) -> Plans:
    """The best layouts of a job, or time and memory of its layout.

    `document` has the keys of `manta plan`'s file (docs/planner.md): model, train, parallel and the cluster. Raises
    SpecError, a ValueError that names each wrong key."""
    folder = Paths.of(Settings.from_environment().home).machines
    wanted = read_request(with_shape_of_weights(document), _nowhere, this_node(folder), measured_machines(folder))
    return Plans.model_validate(to_json(wanted, wanted.answer()))


def _nowhere(_accelerator: str | None) -> Cluster:
    raise SpecError([Problem("cluster.current", "the current cluster is only known to a service", "false")])
