"""The simulated cluster has what the service calls of the real one: it stands in for it without a type that says so."""

import inspect

import pytest

from benchmarks.support.simulation import remote_cluster as simulated
from manta.service.cluster.agents import Agents
from manta.service.cluster.node_daemons import NodeDaemons
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement_groups import NodeRequests, PlacementGroups

# Of nodes that come and go, are lost, drained or lie elsewhere: there are none.
NOT_SIMULATED = {
    "names_on",
    "drain",
    "cancel_drain",
    "undrain",
    "unused",
    "autoscaled_nodes",
    "rest",
    "problem_of_data",
    "end_all",
}


@pytest.mark.parametrize(("real", "stand_in"), [
    (Nodes, simulated.SimulatedNodes),
    (PlacementGroups, simulated.SimulatedGroups),
    (Agents, simulated.SimulatedAgents),
    (NodeDaemons, simulated.SimulatedDaemons),
    (NodeRequests, simulated.SimulatedRequests),
])  # fmt: skip
def test_simulated_components_have_the_methods_of_the_real_ones(real: type, stand_in: type) -> None:
    for name, method in inspect.getmembers(real, inspect.isfunction):
        if not name.startswith("_") and name not in NOT_SIMULATED:
            theirs = getattr(stand_in, name, None)
            assert theirs is not None, f"{stand_in.__name__} has no {name}"
            assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(method), name
