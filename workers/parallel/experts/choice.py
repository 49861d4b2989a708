"""What the tokens of a micro-batch have chosen. It is kept from the first forward on: a router that computes again may
round differently, and send a token to another expert than the one whose result was used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.workers.comm.comm import Comm
from manta.workers.config import ModelConfig
from manta.workers.parallel.experts.exchange import Plan


@dataclass(frozen=True)
class Choice:
    """The choice of one layer."""

    experts_nk: torch.Tensor
    """The experts of each token, int32, ascending."""
    counts_be: torch.Tensor | None
    """How many tokens of each sequence, on all context ranks, have chosen each expert, int64; None if nothing needs
    them."""
    plan: Plan


class StepRouting:
    """What the layers with experts of a rank count in one step."""

    def __init__(
        self,
        model: ModelConfig,
        comm: Comm,
        micro_batches: int,
        sequences: int,
        loss_scale: torch.Tensor | None,
    ):
        """`sequences`: of the global batch; `loss_scale`: the factor in backward of a loss that is a mean over
        sequences, for each sequence, scalar; None if routers have no losses."""
        assert model.moe is not None
        self.sequences, self.loss_scale = sequences, loss_scale
        self.rows = {layer: row for row, layer in enumerate(model.expert_layers)}
        self.counts_first = comm.index("tensor") == 0
        """Whether this rank counts: the tensor ranks have the same tokens."""
        shape = len(self.rows), model.moe.experts
        self.tokens_le = torch.zeros(shape, dtype=torch.int64, device=comm.device)
        """Tokens of this rank that went to each expert of each layer with experts, zero for other ranks' layers."""
        self.losses_m: torch.Tensor | None = None
        """Each micro-batch's part of the routers' own losses, as far as this rank adds it, fp64; None if there are
        none."""
        if loss_scale is not None:
            self.losses_m = torch.zeros(micro_batches, dtype=torch.float64, device=comm.device)


class MicroBatchRouting:
    """The choices of all layers for one micro-batch, which recomputation uses again."""

    def __init__(self, step: StepRouting, micro_batch: int):
        self.step, self.micro_batch = step, micro_batch
        self.choices: dict[int, Choice] = {}
        """By the layer's number in the model."""

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """The factor in backward on the routers' own losses; None if there are none, or another rank adds them."""
        return self.step.loss_scale if self.step.counts_first else None

    def count(self, layer: int, counts_e: torch.Tensor) -> None:
        """So many of this rank's tokens have chosen each expert of a layer."""
        if self.step.counts_first:
            self.step.tokens_le[self.step.rows[layer]] += counts_e

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add this rank's part of one layer's loss, a sum over the micro-batch's sequences, scalar."""
        if self.step.counts_first and self.step.losses_m is not None:
            self.step.losses_m[self.micro_batch] += loss.double() / self.step.sequences
