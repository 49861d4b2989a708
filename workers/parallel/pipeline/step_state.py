"""State of a rank's micro-batches during one step, between the actions of the schedule. Shapes: m micro-batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge

from workers.comm.backend import Handle, Transfer
from workers.data.batches import MicroBatch
from workers.parallel.tensor.weight_gradients import Task

Key = tuple[int, int]
"""(chunk, micro-batch)."""


@dataclass
class Receiving:
    """A receive that has been posted."""

    buffer: torch.Tensor
    work: Handle
    shape: tuple[int, ...]
    """Shape of the whole tensor; the message may be one tensor rank's part of it."""


@dataclass
class Step:
    """State of a rank's micro-batches during one step."""

    batch: list[MicroBatch]
    scale: torch.Tensor
    """Factor on the loss in backward, a scalar in the precision of losses."""
    recomputed: frozenset[tuple[int, int]]
    """(micro-batch, chunk) pairs whose activations are recomputed."""
    losses_m: torch.Tensor
    """fp64 [m]: loss of each micro-batch, summed over its tokens."""
    z_losses_m: torch.Tensor
    """fp64 [m]: its weighted z-loss."""
    valid_tokens: torch.Tensor
    """fp64 scalar: tokens that have a target."""
    dropout_keys: tuple[torch.Tensor, ...]
    """Keys of each micro-batch's samples; empty without dropout."""
    messages: dict[tuple[str, int, int], Receiving] = field(default_factory=dict)
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Leaves of the graphs, whose .grad is sent to the previous virtual stage."""
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Results that were not sent yet."""
    edges: dict[Key, GradientEdge] = field(default_factory=dict)
    """Where backward begins. The output itself is freed once sent: backward does not need its values."""
    head_inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Inputs of the output layer, for backward with `train.head_tokens`."""
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients of outputs that went to another chunk of this rank."""
    input_gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients that were not sent yet."""
    weight_tasks: dict[Key, list[Task]] = field(default_factory=dict)
    """The weights' half of backward, for schedules that separate it."""
    sends: deque[tuple[Transfer, torch.Tensor]] = field(default_factory=deque)
    """Sends in progress, and the tensors that must stay until they are done."""
