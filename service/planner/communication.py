"""How long ranks take to exchange tensors, depending on where they are. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manta.service.planner.hardware import BETWEEN_LATENCY, NUMA_BANDWIDTH, Cluster, Core, Machine
from manta.service.planner.software import Software
from manta.workers.config import ParallelConfig


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with one another."""

    size: int
    per_node: int
    """How many of its members are on one node."""
    through_hosts: bool = False
    """Whether data that leaves a node first goes from the memory of one NUMA node to that of another."""

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Groups:
    """The communication groups of one layout on a cluster."""

    cluster: Cluster
    tensor: Group
    holders: Group
    """Ranks that hold the same parameters: those of all replicas and context ranks."""
    context: Group
    expert: Group
    """Ranks that exchange tokens, among those that the experts of a layer are spread over."""
    expert_holders: Group
    """Ranks that hold the same experts."""
    stage_stride: int
    """Distance between a rank and its counterpart in the next stage."""

    def stages_share_node(self, stage: int, other: int) -> bool:
        """Whether the first ranks of two pipeline stages are on the same node; a node holds whole tensor groups."""
        groups_of_node = max(1, self.cluster.gpus_per_node // self.tensor.size)
        here, there = (each * self.stage_stride // self.tensor.size // groups_of_node for each in (stage, other))
        return here == there


def groups_of(layout: ParallelConfig, cluster: Cluster, software: Software) -> Groups:
    """The groups of a layout. Tensor groups are innermost, then context groups; next come the replicas of a stage, or
    all stages of a replica."""
    t, p, d, c = layout.tensor, layout.pipeline, layout.data, layout.context
    data_stride, stage_stride = (t * c, t * c * d) if software.replicas_inside else (t * c * p, t * c)
    context, holders = _group(c, t, cluster, software), _group(d, data_stride, cluster, software)
    if c > 1:
        holders = Group(c * d, context.per_node * holders.per_node, context.through_hosts or holders.through_hosts)
    expert, expert_holders = _expert_groups(layout, data_stride, cluster, software)
    tensor = _group(t, 1, cluster, software)
    return Groups(cluster, tensor, holders, context, expert, expert_holders, stage_stride)


def _expert_groups(
    layout: ParallelConfig, data_stride: int, cluster: Cluster, software: Software
) -> tuple[Group, Group]:
    """An expert group, whose ranks are consecutive holders (context ranks first), and the ranks with the same
    experts."""
    t, c, e = layout.tensor, layout.context, layout.exchange_size
    inside = math.gcd(e, c)  # in the same replica
    groups = []
    for of_context, stride, of_data, apart in (
        (inside, t, e // inside, data_stride),
        (c // inside, t * inside, layout.expert_holders // (c // inside), data_stride * (e // inside)),
    ):
        context, data = _group(of_context, stride, cluster, software), _group(of_data, apart, cluster, software)
        through_hosts = context.through_hosts or data.through_hosts
        groups.append(Group(of_context * of_data, context.per_node * data.per_node, through_hosts))
    return groups[0], groups[1]


def _group(size: int, stride: int, cluster: Cluster, software: Software) -> Group:
    """The group of every `stride`-th rank, `size` of them.

    With NCCL before 2.12 a ring leaves a node over the adapter by which it came in, from the ring's last member there.
    If no two members are next to the same adapters, that member's GPU is on another NUMA node, too far for the adapter
    to read its memory, and the hosts pass the data on. This is what the search of 2.7.8 and 2.8.3 does on a DGX A100
    (github.com/NVIDIA/nccl, src/graph/search.cc and paths.cc).
    """
    machine, members = cluster.machine, max(1, min(size, cluster.gpus_per_node // stride))
    apart = machine.numa_nodes > 0 and stride >= machine.devices / machine.numa_nodes
    return Group(size, members, apart and 1 < members < size and not software.forwards_inside)


def bus_bandwidth(group: Group, cluster: Cluster) -> float:
    """Bus bandwidth of a ring over the group in bytes/s, while all other groups of its kind communicate too."""
    machine, constants = cluster.machine, cluster.machine.constants
    inside = machine.accelerator.link_bandwidth * constants.inside
    if group.nodes == 1:
        return inside
    # A node's groups share its adapters; each group's ring leaves the node once over each of the group's adapters.
    # Groups that fill whole nodes use neighbouring nodes; groups with a part of each node are spread over the cluster.
    adapters = machine.adapters_per_accelerator * group.per_node
    reached = constants.message if group.per_node == cluster.gpus_per_node else constants.collective
    outside = adapters * machine.adapter_bandwidth * reached
    if group.through_hosts:
        # There is one ring per member, and the devices of a NUMA node share its path to the other nodes.
        outside = min(outside, group.per_node * NUMA_BANDWIDTH * machine.numa_nodes / machine.devices)
    return min(inside, outside)


def _ring_latency(group: Group, machine: Machine) -> float:
    """Seconds that an empty tensor takes once round a ring."""
    between = group.nodes if group.nodes > 1 else 0
    return (group.size - between) * machine.hop_seconds + between * BETWEEN_LATENCY


def _tree_latency(group: Group, machine: Machine) -> float:
    """Seconds up a tree over the nodes and down again, with chains inside the nodes."""
    inside = (min(group.per_node, group.size) - 1) * machine.hop_seconds
    return 2 * (inside + math.ceil(math.log2(group.nodes)) * BETWEEN_LATENCY)


def _message_on_core(core: Core, size: float) -> float:
    """Seconds of the core at one end of a message of `size` bytes: over the engine's own links
    (`workers/comm/links_backend.py`) every rank sends its part directly to each rank that needs it."""
    return core.message_seconds + size / core.link


def gather_seconds(group: Group, cluster: Cluster, size: float) -> float:
    """All-gather or reduce-scatter of a tensor of `size` bytes: (n - 1)/n of it over the bus."""
    if group.size == 1:
        return 0.0
    if (core := cluster.machine.core) is not None:
        return 2 * (group.size - 1) * _message_on_core(core, size / group.size)
    latency = _ring_latency(group, cluster.machine)
    return (group.size - 1) / group.size * size / bus_bandwidth(group, cluster) + latency


def exchange_seconds(group: Group, cluster: Cluster, size: float) -> float:
    """All-to-all of `size` bytes a rank, of which each other rank gets an equal part: inside nodes over their links,
    and at the same time between nodes over the adapters."""
    if group.size == 1:
        return 0.0
    if cluster.machine.core is not None:
        return gather_seconds(group, cluster, size)
    machine, constants = cluster.machine, cluster.machine.constants
    members = min(group.per_node, group.size)
    inside = (members - 1) / group.size * size / (machine.accelerator.link_bandwidth * constants.inside)
    adapters = machine.adapters_per_accelerator * machine.adapter_bandwidth * constants.message
    outside = (group.size - members) / group.size * size / adapters
    return max(inside, outside) + (machine.hop_seconds if group.nodes == 1 else BETWEEN_LATENCY)


def reduce_seconds(group: Group, cluster: Cluster, size: float) -> float:
    """All-reduce of `size` bytes: as much as a reduce-scatter and an all-gather move."""
    if group.size == 1:
        return 0.0
    if (core := cluster.machine.core) is not None:
        if group.size == 2:
            return 2 * _message_on_core(core, size)
        return 2 * gather_seconds(group, cluster, size)
    latency = _tree_latency(group, cluster.machine)
    return 2 * (group.size - 1) / group.size * size / bus_bandwidth(group, cluster) + latency


def message_seconds(cluster: Cluster, size: float, same_node: bool) -> float:
    """Seconds of a message from one rank to another; between cores, of the core at each end."""
    if (core := cluster.machine.core) is not None:
        return _message_on_core(core, size) + (0.0 if same_node else size / cluster.machine.adapter_bandwidth)
    machine, constants = cluster.machine, cluster.machine.constants
    if same_node:
        return size / (machine.accelerator.link_bandwidth * constants.inside) + machine.hop_seconds
    bandwidth = min(1.0, machine.adapters_per_accelerator) * machine.adapter_bandwidth * constants.message
    return size / bandwidth + BETWEEN_LATENCY
