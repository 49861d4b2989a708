"""What we read from inside of Ray, as far as no running Ray is needed to see that we read it right."""

from types import SimpleNamespace

import pytest

from manta.service.cluster.ray_private import actors_on, node_of_actor, node_types, placement_group_states, session_name


def ray_with(*groups):
    """A Ray in namespace `ours` that knows these groups: (name, namespace, state)."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group  # who starts a Ray must be the first to

    table = [
        Group(name=name, ray_namespace=namespace, state=Group.PlacementGroupState.Value(state)).SerializeToString()
        for name, namespace, state in groups
    ]

    def by_name(name, namespace):
        living = (
            each
            for each, about in zip(table, groups, strict=True)
            if about[:2] == (name, namespace) and about[2] != "REMOVED"
        )
        return next(living, None)

    accessor = SimpleNamespace(get_placement_group_table=lambda: table, get_placement_group_by_name=by_name)
    state = SimpleNamespace(_connect_and_get_accessor=lambda: accessor)
    return SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(namespace="ours"),
        _private=SimpleNamespace(state=SimpleNamespace(state=state)),
    )


@pytest.mark.parametrize("order", [1, -1])
def test_removed_placement_group_does_not_hide_a_newer_one_of_its_name(order):
    """Else what the other one holds would never be given back."""
    groups = [("replica/a/3/1", "ours", "REMOVED"), ("replica/a/3/1", "ours", "CREATED")]
    assert placement_group_states(ray_with(*groups[::order])) == {"replica/a/3/1": "CREATED"}


def test_placement_groups_of_other_namespaces_are_ignored():
    groups = [("a", "ours", "PENDING"), ("b", "theirs", "CREATED"), ("c", "ours", "REMOVED")]
    assert placement_group_states(ray_with(*groups)) == {"a": "PENDING"}


def test_placement_groups_are_looked_up_by_name_without_listing_all():
    ray = ray_with(
        ("a", "ours", "PENDING"), ("b", "theirs", "CREATED"), ("c", "ours", "REMOVED"), ("d", "ours", "CREATED")
    )
    ray._private.state.state._connect_and_get_accessor().get_placement_group_table = None
    assert placement_group_states(ray, ["a", "b", "c"]) == {"a": "PENDING"}


def test_ray_actors_on_a_node_are_found_with_one_query():
    from ray.core.generated.gcs_pb2 import ActorTableData as Actor

    def about(name, namespace, node):
        return Actor(name=name, ray_namespace=namespace, address={"node_id": bytes.fromhex(node)}).SerializeToString()

    known = [about("a", "ours", "ab12"), about("b", "theirs", "ab12"), about("c", "ours", "cd34")]
    accessor = SimpleNamespace(get_actor_table=lambda job, state: known if (job, state) == (None, "ALIVE") else [])
    ray = ray_with()
    ray._private.state.state._connect_and_get_accessor = lambda: accessor
    assert actors_on(ray, "ab12") == ["a"]


@pytest.mark.parametrize(
    ("about", "node"),
    [
        ({"Address": {"NodeID": "n1"}}, "n1"),
        ({"Address": {}}, None),
        ({"Address": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_node_of_an_actor_is_unknown_until_ray_has_placed_it(about, node):
    state = SimpleNamespace(actors=lambda actor_id: about if actor_id == "ab12" else {"Address": {"NodeID": "another"}})
    actor = SimpleNamespace(_actor_id=bytes.fromhex("ab12"))
    assert node_of_actor(SimpleNamespace(_private=SimpleNamespace(state=state)), actor) == node


def test_ray_cluster_is_identified_by_its_session_name():
    worker = SimpleNamespace(global_worker=SimpleNamespace(node=SimpleNamespace(session_name="session_1")))
    assert session_name(SimpleNamespace(_private=SimpleNamespace(worker=worker))) == "session_1"


def test_node_types_are_those_the_autoscaler_gave_to_living_nodes():
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

    reply = GetClusterResourceStateReply()
    for node_id, name, status in ((b"\1", "small", "RUNNING"), (b"\2", "", "IDLE"), (b"\3", "small", "DEAD")):
        node = reply.cluster_resource_state.node_states.add()
        node.node_id, node.ray_node_type_name, node.status = node_id, name, NodeStatus.Value(status)
    client = SimpleNamespace(get_cluster_resource_state=reply.SerializeToString)
    worker = SimpleNamespace(global_worker=SimpleNamespace(gcs_client=client))
    assert node_types(SimpleNamespace(_private=SimpleNamespace(worker=worker))) == {"01": "small", "02": ""}
