"""ZeRO-1 (arXiv:1910.02054, section 5.1): gradients are reduced into equal parts over the data group, each replica
keeps the optimizer state of its part alone and updates it, and the updated parts are gathered again.

AdamW itself is torch's (fused), on flat ranges: decoupled weight decay on the decayed one, none on the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.comm import Comm
from workers.config import OptimizerConfig
from workers.parallel.flat import FlatParameters, overlap


@dataclass(frozen=True)
class StepStatistics:
    """Numbers about one step, the same on every rank."""

    loss: float
    """Mean loss over the global batch, in nats a token."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    memory_bytes: int
    """Largest memory use of any rank."""


class ZeroOptimizer:
    """The optimizer of one rank: its part of the flat parameters with the moments of that part."""

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, comm: Comm, sequence_parallel: bool, tied: bool):
        """`tied`: the last stage's output layer shares the first stage's token embedding."""
        self.flat, self.config, self.comm = flat, config, comm
        self.sequence_parallel, self.tied = sequence_parallel, tied
        length = flat.size // comm.size("data")
        self.part = (comm.index("data") * length, (comm.index("data") + 1) * length)
        self.parameters = flat.parameters[self.part[0] : self.part[1]]
        self.exp_avg = torch.zeros_like(self.parameters)
        self.exp_avg_sq = torch.zeros_like(self.parameters)
        self._groups = self._decay_groups()
        self._adamw = torch.optim.AdamW(
            [{"params": [parameter], "weight_decay": decay} for parameter, decay, _ in self._groups],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        self.set_step(0)

    def _decay_groups(self) -> list[tuple[torch.nn.Parameter, float, slice]]:
        """The part cut where weight decay begins or ends: (view, decay, slice of the part)."""
        start, end = self.part
        decayed = overlap(self.part, self.flat.ranges.decayed)
        pieces = [((start, decayed[0]), 0.0), (decayed, self.config.weight_decay), ((decayed[1], end), 0.0)]
        if decayed[0] == decayed[1]:
            pieces = [((start, end), 0.0)]
        groups = []
        for (first, last), decay in pieces:
            if last > first:
                where = slice(first - start, last - start)
                groups.append((torch.nn.Parameter(self.parameters[where], requires_grad=True), decay, where))
        return groups

    def set_step(self, step: int) -> None:
        """Tell AdamW that `step` steps are done and that its moments are this object's flat buffers."""
        for parameter, _, where in self._groups:
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=parameter.device),
                "exp_avg": self.exp_avg[where],
                "exp_avg_sq": self.exp_avg_sq[where],
            }

    def step(self, learning_rate: float, loss_sum: torch.Tensor, memory_bytes: int) -> StepStatistics:
        """Reduce the gradients, agree on the norm with all ranks, clip, update, gather. Clears the gradients.

        `loss_sum` is this rank's share of the global mean loss (fp64 scalar; zero on ranks that do not know it).
        Every rank is inside this call when any of them updates its parameters.
        """
        self._sum_replicated_gradients()
        self._sum_tied_gradients()
        gradient = self.comm.reduce_scatter("data", self.flat.gradients)
        statistics = self._agree(gradient, loss_sum, memory_bytes)
        clip = self.config.clip_norm
        if clip and statistics.grad_norm > clip:
            gradient.mul_(clip / (statistics.grad_norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for parameter, _, where in self._groups:
            parameter.grad = gradient[where]
        self._adamw.step()
        self.gather_parameters()
        self.flat.gradients.zero_()
        return statistics

    def gather_parameters(self) -> None:
        """Give every replica all parts of the updated parameters."""
        if self.comm.size("data") > 1:
            self.comm.all_gather("data", self.parameters.clone(), out=self.flat.parameters)

    def _sum_replicated_gradients(self) -> None:
        """Under sequence parallelism a tensor rank saw only its part of the sequence (arXiv:2205.05198, 4.2.2)."""
        start, end = self.flat.ranges.replicated
        if self.sequence_parallel and end > start:
            self.comm.all_reduce("tensor", self.flat.gradients[start:end])

    def _sum_tied_gradients(self) -> None:
        """The tied embedding gets the gradients of both of its uses, on the first and on the last stage."""
        slot = self.flat.slot("embedding.token.weight") if self.tied else None
        if slot is not None and self.comm.size("embedding") > 1:
            self.comm.all_reduce("embedding", self.flat.gradients[slot.start : slot.end])

    def _agree(self, gradient: torch.Tensor, loss_sum: torch.Tensor, memory_bytes: int) -> StepStatistics:
        """One reduction over all ranks: squared norm, loss, and each rank's memory in its own place."""
        shared = torch.zeros(2 + self.comm.size("world"), dtype=torch.float64, device=gradient.device)
        shared[0] = self._counted_square(gradient)
        shared[1] = loss_sum
        shared[2 + self.comm.index("world")] = memory_bytes
        self.comm.all_reduce("world", shared)
        values = shared.tolist()
        return StepStatistics(values[1], values[0] ** 0.5, int(max(values[2:])))

    def _counted_square(self, gradient: torch.Tensor) -> torch.Tensor:
        """Squared norm of the parameters that this rank answers for: each global parameter is counted once."""
        square = _square(gradient)
        left_out = [self.flat.ranges.shared_copy]
        if self.comm.index("tensor") > 0:
            left_out.append(self.flat.ranges.replicated)
        for not_mine in left_out:
            start, end = overlap(self.part, not_mine)
            square = square - _square(gradient[start - self.part[0] : end - self.part[0]])
        return square


def _square(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.double().square().sum()
