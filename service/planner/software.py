"""How engines differ in running the same layout: fused kernels, overlap, paths of messages. Pure Python.

The planner plans for `MANTA`. The others are the engines that published tables were measured on, so that the machines'
constants can be checked against those tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from manta.service.planner.hardware import Machine
from manta.workers.accounting.activation_bytes import IMBALANCE


@dataclass(frozen=True)
class Software:
    """Properties of an engine."""

    name: str
    fused: bool = True
    """Whether consecutive element-wise operations are one kernel: bias and GELU; bias, dropout and residual; scale,
    mask and softmax."""
    overlaps_tensor: float = 0.0
    """Part of the reduction of an input's gradient over the tensor group that is hidden by the product for the weights,
    if that takes long enough. The rest is what both lose by sharing the device."""
    blocks_on_messages: bool = True
    """Whether messages between stages occupy both ends, one message after the other."""
    scatters_messages: bool = False
    """Whether a message is split over several adapters and gathered at the other end (arXiv:2104.04473, section
    4.1)."""
    overlaps_gradients: bool = False
    """Whether gradients are reduced over the replicas during the last backward."""
    gradient_bytes: int = 2
    """Bytes per gradient element in the reduction over replicas."""
    accumulation_bytes: float = 6.0
    """Memory traffic per parameter to add one micro-batch's gradient, in addition to the product's own output."""
    optimizer_bytes: float = 62.0
    """Memory traffic per parameter of one update: scaling, norm, clipping, Adam, copies between precisions."""
    loss_bytes: tuple[float, float] = (40.0, 16.0)
    """Memory traffic per fp32 logit of the loss, and of its gradient. Forward: conversion to fp32, maximum, difference,
    exponentials, their sum, quotient."""
    replicas_inside: bool = True
    """Whether the ranks of one stage's replicas are consecutive, so that they share nodes; otherwise whole replicas
    do."""
    forwards_inside: bool = False
    """Whether data that leaves a node first goes to the GPU nearest the adapter (NCCL since 2.12)."""
    compiled_optimizer_bytes: float | None = None
    """`optimizer_bytes` with torch.compile; None: the same."""
    counts_kernels: bool = False
    """Whether a layer's element-wise kernels are counted one by one for this engine, compiled or eager
    (`engine_passes.py`), instead of by the common estimate."""
    update_operations: int = 0
    """Operations of the host at the end of a step; on the device they are kernels with next to no work."""
    groups_experts: bool = False
    """Whether the products of all experts of a rank are one kernel, instead of one for each."""
    sends_rows_again: bool = True
    """Whether the inputs of experts on other ranks are sent again in backward, instead of kept there."""
    imbalance: float = IMBALANCE
    """Rows of the busiest expert-parallel rank, relative to the mean: one where tables are of balanced tokens."""
    shards_optimizer: bool = False
    """Whether with `zero: 1` each replica updates a part of the parameters, followed by an all-gather (of 16-bit
    parameters)."""


MEGATRON_2020 = Software("megatron-2020", overlaps_gradients=True)
"""Megatron-LM as of September 2020 (its README's tables): torch's DistributedDataParallel."""
MEGATRON_2021 = Software("megatron-2021", optimizer_bytes=66.0)
"""arXiv:2104.04473: local gradients in 16 bits, reduced after backward; blocking messages. Its source of April 2021
copies gradients together, divides them and copies them back (12 bytes, with one replica or many), then converts to fp32
(6), unscales (8), norm (4), clips (8), Adam (28), copies parameters (6); less 6, as the first micro-batch's gradients
are not added to anything."""
MEGATRON_2021_SCATTER = replace(MEGATRON_2021, name="megatron-2021-scatter-gather", scatters_messages=True)
"""`MEGATRON_2021` with the scatter/gather optimization of arXiv:2104.04473, section 4.1."""
MEGATRON_2022 = Software(
    "megatron-2022",
    overlaps_tensor=0.75,
    scatters_messages=True,
    gradient_bytes=4,
    accumulation_bytes=0.0,
    optimizer_bytes=58.0,
)
"""arXiv:2205.05198: sums of gradients in fp32, which the product itself adds to; reduction overlaps with weight
gradients."""
MEGATRON_DEEPSPEED_2021 = Software(
    "megatron-deepspeed-2021", gradient_bytes=4, accumulation_bytes=26.0, optimizer_bytes=58.0
)
"""arXiv:2201.11990: DeepSpeed's pipeline, bf16. Gradients are kept in 16 bits (6 bytes to add, 2 to clear) and added to
sums in fp32 after each micro-batch (18, with a copy in fp32 between)."""
MANTA = Software(
    "manta",
    fused=False,
    overlaps_tensor=0.75,
    blocks_on_messages=False,
    overlaps_gradients=True,
    gradient_bytes=4,
    accumulation_bytes=12.0,
    replicas_inside=False,
    forwards_inside=True,
    shards_optimizer=True,
)
"""This engine."""
MANTA_ON_MEASURED_GPU = replace(
    MANTA,
    name="manta-on-measured-gpu",
    counts_kernels=True,
    update_operations=110,
    optimizer_bytes=46.0,
    compiled_optimizer_bytes=34.0,
)
"""This engine on calibrated GPUs. Update: gradients are read for their norm (4) and scaled (8), AdamW (28), the
parameters rounded (6); compiled, all but the norm in one pass (30)."""
MANTA_ON_CPU = replace(
    MANTA,
    name="manta-on-cpu",
    overlaps_tensor=0.0,
    blocks_on_messages=True,
    scatters_messages=True,
    overlaps_gradients=False,
    accumulation_bytes=0.0,
    optimizer_bytes=40.0,
    loss_bytes=(24.0, 8.0),
)
"""This engine with ranks on cores: sending and receiving takes a core's time, so nothing hides it; products add to the
sums of gradients directly; the update reads and writes what AdamW needs (28 bytes), the norm (4) and clipping (8)."""


def engine_on(machine: Machine) -> Software:
    """This engine as it runs on `machine`."""
    if machine.core is not None:
        return MANTA_ON_CPU
    return MANTA if machine.gpu is None else MANTA_ON_MEASURED_GPU
