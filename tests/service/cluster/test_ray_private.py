"""What we read from inside of Ray, as far as no running Ray is needed to see that we read it right."""

from types import SimpleNamespace

import pytest

from service.cluster.ray_private import placement_group_states


def ray_with(*groups):
    """A Ray in namespace `ours` that knows these groups: (name, namespace, state)."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group  # who starts a Ray must be the first to

    table = [
        Group(name=name, ray_namespace=namespace, state=Group.PlacementGroupState.Value(state)).SerializeToString()
        for name, namespace, state in groups
    ]
    accessor = SimpleNamespace(get_placement_group_table=lambda: table)
    state = SimpleNamespace(_connect_and_get_accessor=lambda: accessor)
    return SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(namespace="ours"),
        _private=SimpleNamespace(state=SimpleNamespace(state=state)),
    )


@pytest.mark.parametrize("order", [1, -1])
def test_group_that_was_removed_hides_no_other_of_its_name(order):
    """Else what the other one holds would never be given back."""
    groups = [("replica/a/3/1", "ours", "REMOVED"), ("replica/a/3/1", "ours", "CREATED")]
    assert placement_group_states(ray_with(*groups[::order])) == {"replica/a/3/1": "CREATED"}


def test_groups_of_other_namespaces_are_not_ours():
    groups = [("a", "ours", "PENDING"), ("b", "theirs", "CREATED"), ("c", "ours", "REMOVED")]
    assert placement_group_states(ray_with(*groups)) == {"a": "PENDING"}
