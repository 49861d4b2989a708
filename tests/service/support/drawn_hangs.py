"""Gangs over NCCL that run a drawn program in which a rank hangs: real `Comm`s on devices that are pretended."""

import math
import random

import torch

from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.liveness.progress import Progress
from tests.workers.support.pretended_devices import Gang, Network, no_thread

LAYOUTS = [
    *((2, 2, 2), (1, 1, 4), (4, 1, 1), (1, 4, 2), (2, 1, 2), (1, 1, 2), (1, 2, 1), (1, 2, 2, 2), (2, 1, 1, 2)),
    *((1, 1, 4, 1, 2), (2, 1, 2, 2, 4), (1, 2, 2, 1, 2)),
]
"""Tensor-, pipeline- and data-parallel sizes, and context and expert sizes other than 1."""
NUMBER = torch.zeros(8)


def grid_of(layout):
    tensor, pipeline, data, context, expert = (*layout, 1, 1)[:5]
    return RankGrid(ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert))


def program(seed, grid):
    """What all ranks do, in one order: collectives, some of which are waited for later, and hops down the pipeline."""
    choice, collective = random.Random(seed), [axis for axis in grid.axes if axis not in ("pipeline", "embedding")]
    kinds = [*collective, *collective, "hop", "late data"]
    return [*choice.choices(kinds, k=20), "world"]


def do(comm, device, kind, late):
    """One action of a rank's host."""
    device.queue("compute", 1.0)
    if kind == "hop":
        stage, stages = comm.index("pipeline"), comm.size("pipeline")
        if stage > 0:
            comm.receive(stage - 1, NUMBER).wait()
        device.queue("compute", 1.0)
        if stage + 1 < stages:
            late.append(comm.send(stage + 1, NUMBER))
    elif kind == "late data":
        late.append(comm.start_all_reduce("data", NUMBER))
    else:
        if kind == "world":
            while late:
                late.pop().wait()
        comm.all_reduce(kind, NUMBER)


def hang(layout, seed, how, broken=lambda meeting: False, progress=lambda rank: Progress()):
    """A gang that runs a program in which one rank hangs: its device in a kernel, or its host before it has queued
    more. (Gang, that rank, whether anybody's device still waits.)"""
    gang, choice = Gang(grid_of(layout), Network(broken=broken), progress), random.Random(seed)
    actions = program(seed, gang.grid)
    hung, at = choice.randrange(gang.grid.world_size), choice.randrange(len(actions))
    with no_thread():
        for comm, device in zip(gang.comms, gang.devices, strict=True):
            comm.step.begin(1)
            late = []
            for number, kind in enumerate(actions):
                if comm.rank == hung and number == at and how != "nobody":
                    if how == "host":
                        break
                    device.queue("compute", math.inf)
                do(comm, device, kind, late)
        gang.run()
    return gang, hung
