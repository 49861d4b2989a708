"""The parts of Ray that we use without a promise of stability: every such name, and the version that it was tried with.

After an update of Ray this is the file to check; `tests/service/cluster` runs all of it against the installed version.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIED_WITH = ("2.52.0", "2.60.0")
"""The oldest and the newest version of Ray for which everything here is known to work."""

ANSWER_SECONDS = 10.0

START_COMMAND = "from ray.scripts.scripts import main; main()"
"""Python program of the `ray` command, for an interpreter whose scripts are not on the path."""

STARTUP_CONCURRENCY = "RAY_worker_maximum_startup_concurrency"
"""Environment variable of the head: how many workers it starts at the same time."""

MEMORY_MONITOR_MILLISECONDS = "RAY_memory_monitor_refresh_ms"
"""Environment variable of the head: how often it looks for memory to free by killing workers, in milliseconds; 0:
never."""

RECONNECT_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable of any process of Ray, read when `ray` is imported: how many seconds the process waits for a
missing head before it ends itself."""

NO_AUTOSCALER = "--no-monitor"
"""Option of the head that `ray start --help` does not show: run without the process that would start and end nodes of a
cloud. That process takes 80 MB and a second of a core, and there is no cloud."""


RAYLET = "raylet"
HEAD_PROCESSES = ("gcs_server", RAYLET)
"""Names of the head's child processes without which it places nothing: its control store and its node. If one of them
ends without an error, or by SIGTERM, `ray start --block` takes that for intended and stays."""


def sockets_of(session: str | Path) -> tuple[Path, ...]:
    """The sockets of the head's node in its `session` folder, by which processes on its machine join it."""
    folder = Path(session) / "sockets"
    return folder / "raylet", folder / "plasma_store"


def address_file(ray_folder: Path) -> Path:
    """Where a head that runs in `ray_folder` writes its address, host:port."""
    return ray_folder / "ray_current_cluster"


def free_resources(ray: Any) -> dict[str, dict[str, float]]:
    """By node id, what nobody holds, by name of the resource. `ray`: the module, connected."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return free


def placement_group_states(ray: Any, names: Collection[str] | None = None) -> dict[str, str]:
    """By name, the state of each placement group of this process's namespace, or of those with these names, that was
    not removed: Ray remembers removed ones, and another group may have the name by now. Going through all takes longer
    the more there ever were (6 microseconds each). `placement_group_table` does not report the namespaces."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group

    namespace = ray.get_runtime_context().namespace
    accessor = ray._private.state.state._connect_and_get_accessor()
    if names is None:
        encoded = accessor.get_placement_group_table()
    else:
        encoded = filter(None, (accessor.get_placement_group_by_name(name, namespace) for name in names))
    groups = [Group.FromString(each) for each in encoded]
    state_name, removed = Group.PlacementGroupState.Name, Group.PlacementGroupState.REMOVED
    ours = [group for group in groups if group.ray_namespace == namespace and group.state != removed]
    return {group.name: state_name(group.state) for group in ours}


def node_types(ray: Any) -> dict[str, str]:
    """By node id, the autoscaler's name for the type of each living node; empty for one that it did not start."""
    from ray.core.generated.autoscaler_pb2 import DESCRIPTOR, ClusterResourceState, GetClusterResourceStateReply

    client = ray._private.worker.global_worker.gcs_client
    reply = GetClusterResourceStateReply.FromString(client.get_cluster_resource_state())
    dead = DESCRIPTOR.enum_types_by_name["NodeStatus"].values_by_name["DEAD"].number
    state: ClusterResourceState = reply.cluster_resource_state
    return {node.node_id.hex(): node.ray_node_type_name for node in state.node_states if node.status != dead}


def actors_on(ray: Any, node: str) -> list[str]:
    """The names of the actors of this process's namespace that live on a node. One request, however many there are."""
    from ray.core.generated.gcs_pb2 import ActorTableData as Actor

    namespace = ray.get_runtime_context().namespace
    accessor = ray._private.state.state._connect_and_get_accessor()
    actors = (Actor.FromString(each) for each in accessor.get_actor_table(None, "ALIVE"))
    return [actor.name for actor in actors if actor.ray_namespace == namespace and actor.address.node_id.hex() == node]


def node_of_actor(ray: Any, actor: Any) -> str | None:
    """Id of the node on which an actor was placed; None if it has not been placed yet."""
    about = ray._private.state.actors(actor._actor_id.hex()) or {}
    node: str | None = (about.get("Address") or {}).get("NodeID")
    return node


@dataclass(frozen=True)
class Raylet:
    """A raylet that Ray knows."""

    host: str
    port: int
    alive: bool
    """Whether Ray considers it alive."""
    sockets: tuple[str, ...]
    """Paths of its Unix sockets, on its machine. A process that joins Ray looks for them under their first names, which
    a machine's next raylet does not get while the files of the previous one exist."""


def raylets(address: str) -> list[Raylet]:
    """The raylets of the Ray whose control store is at `address`, for a process that is not connected to it. Raises
    Ray's errors if it does not answer, or refuses our token."""
    from ray import _raylet
    from ray._private.state import GlobalState

    compiled: Any = _raylet
    state = GlobalState()
    options = compiled.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    try:
        return [
            Raylet(
                str(node["NodeManagerAddress"]),
                int(node["NodeManagerPort"]),
                bool(node["Alive"]),
                (str(node["RayletSocketName"]), str(node["ObjectStoreSocketName"])),
            )
            for node in state.node_table()
        ]
    finally:
        state.disconnect()


def outlives_head(address: str) -> bool:
    """Whether the Ray whose control store is at `address` keeps its state where the end of its head does no harm. This
    process need not be connected to it. Raises Ray's errors if it does not answer, or refuses our token."""
    from ray import _raylet

    compiled: Any = _raylet
    client = compiled.GcsClient(address=address)
    storage = client.internal_kv_get(b"extra_usage_tag_gcs_storage", b"usage_stats", ANSWER_SECONDS)
    return storage is not None and storage != b"memory"


def session_name(ray: Any) -> str:
    """Identifies the cluster that this process is connected to: the name is new for each. `ray`: the module,
    connected."""
    return str(ray._private.worker.global_worker.node.session_name)
