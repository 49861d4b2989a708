"""The loss on held-out text."""

from __future__ import annotations

import torch

from workers.comm.comm import Comm
from workers.data.batches import Batches
from workers.engine import Engine
from workers.parallel.data.elastic_sums import shared_leaves, sum_of_halves


class Validation:
    """Measures the validation loss of one rank's engine together with all others."""

    def __init__(self, engine: Engine, batches: Batches, comm: Comm):
        self.engine, self.batches, self.comm = engine, batches, comm
        self._train = engine.spec.train

    def due(self, step: int) -> bool:
        """Whether the validation loss is measured after committed step `step`."""
        every = self._train.validate_every
        return every > 0 and step % every == 0

    def loss(self) -> float:
        """Mean loss over the validation batches, in nats a token; the same on every rank. Raises PeerLost."""
        count, (places, mine) = self.batches.validation_batches(), self._loss_places()
        sums = torch.zeros(1 + count * places, dtype=torch.float64, device=self.comm.device)
        losses = sums[1:].view(count, places)
        with self.comm.step.phase("validation"):
            for index in range(count):
                losses_m, tokens = self.engine.pipeline.evaluate(self.batches.validation(index))
                losses[index, mine.start : mine.stop] = losses_m if len(mine) == len(losses_m) else losses_m.sum()
                sums[0] += tokens
            self.comm.all_reduce("world", sums)
        return float(sum_of_halves(sums[1:]) / sums[0])

    def _loss_places(self) -> tuple[int, range]:
        """How many numbers make up the loss of a validation batch, and which of them this replica knows: one for every
        micro-batch where the number of replicas shall not matter, else their sum."""
        if self._train.deterministic == "layout":
            return 1, range(1)
        return shared_leaves(self.engine.spec, self._train.global_batch_size, self.comm.index("data"))
