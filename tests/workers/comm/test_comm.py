"""The process groups of a generation: every rank makes the same ones, whatever its place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engine_specs import axes
from rank_processes import join_default_group

from workers.comm.comm import Comm
from workers.config import ParallelConfig


def sums_of_ranks(comm: Comm, port: int) -> dict[str, tuple[float, int]]:
    """Over each group, the sum of its members' ranks; the groups as they are made on GPUs, but over gloo."""
    join_default_group(comm, port)
    comm._connect_groups()
    found = {}
    for name, group in comm._groups.items():
        total = torch.tensor([float(comm.rank)])
        dist.all_reduce(total, group=group)
        axis = "pipeline" if name.startswith("pipeline") else name
        found[name] = (total.item(), sum(comm._ranks[axis]))
    return found


@pytest.mark.parametrize("layout", [(1, 3, 1), (2, 3, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_groups_meet_in_every_layout(ranks, layout):
    for rank in ranks.run(ParallelConfig(**axes(layout)), sums_of_ranks, ranks.port):
        assert {"world", "pipeline_up", "pipeline_down"} <= set(rank)
        for name, (found, expected) in rank.items():
            assert found == expected, name
