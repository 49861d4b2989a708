"""The agreement of all ranks on a step: one sum over all ranks, after which the step is committed.

Each rank writes what it alone knows into its own elements of one vector and leaves the others zero, so the sum is an
exchange at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.comm.comm import Comm
from workers.parallel.data.gradient_norm import SquaredNorm
from workers.parallel.data.step_statistics import Loss


class Agreement:
    """One fp64 vector, and named views of its slices."""

    def __init__(self, comm: Comm, replica_ranks: int = 0, micro_batches: int = 0, z_losses: int = 0):
        """`replica_ranks`, `micro_batches`, `z_losses`: lengths of the slices that only elastic sums need, the last one
        with a z-loss."""
        self._comm, world = comm, comm.size("world")
        sizes = (world, world, replica_ranks, micro_batches, z_losses)
        self._values = torch.zeros(9 + sum(sizes), dtype=torch.float64, device=comm.device)
        self.loss, self.z_loss, self.tokens, self.square = self._values[:4]
        """Scalars: loss and z-loss summed over tokens, tokens that have a target, squared norm of the summed
        gradients."""
        self.asked_to_end, self.asked_to_rest, self.saving, self.trace, self.traced_steps = self._values[4:9]
        """Scalars: number of ranks that were asked to end after the step, to rest, and that are writing a checkpoint;
        number of the trace that begins with the next step, and its number of steps, or 0."""
        slices = self._values[9:].split(sizes)
        self.memory_bytes, self.own_seconds, self.rank_squares, self.micro_batch_losses, self.micro_batch_z = slices
        """[world]: each rank's memory in use, and the time of its step in which it did not wait for others. [p t]:
        squared norm by rank of a replica. [micro-batches of the global batch]: loss and z-loss of each."""

    def sum(self) -> None:
        """Sum over all ranks. Raises PeerLost."""
        self._comm.all_reduce("world", self._values)


class StepSums:
    """Performs a step's agreement."""

    def __init__(self, comm: Comm, norm: SquaredNorm):
        self.comm, self.norm = comm, norm

    def agree(self, gradient: Sequence[torch.Tensor], loss: Loss, memory_bytes: int) -> Agreement:
        """The sums over all ranks, of this rank's reduced `gradient`, its part of each bucket, among others."""
        agreed = Agreement(self.comm)
        self._write_own(agreed, loss, memory_bytes)
        agreed.loss.copy_(loss.losses_m.sum())
        if loss.z_losses_m is not None:
            agreed.z_loss.copy_(loss.z_losses_m.sum())
        agreed.square.copy_(self.norm.square(gradient))
        agreed.sum()
        return agreed

    def _write_own(self, agreed: Agreement, loss: Loss, memory_bytes: int) -> None:
        """All elements except losses and norm."""
        index = self.comm.index("world")
        agreed.tokens.copy_(loss.tokens)
        agreed.memory_bytes[index] = memory_bytes
        agreed.own_seconds[index] = self.comm.own_seconds
        agreed.asked_to_end.fill_(float(self.comm.asked_to_end))
        agreed.asked_to_rest.fill_(float(self.comm.asked_to_rest))
        agreed.saving.fill_(float(self.comm.saving))
        trace = self.comm.trace_due
        if trace is not None:
            agreed.trace.fill_(float(trace.number))
            agreed.traced_steps.fill_(float(trace.steps))
