"""The losses on held-out texts."""

from __future__ import annotations

import torch

from manta.workers.comm.comm import Comm
from manta.workers.data.batches import Batches, HeldOut
from manta.workers.engine import Engine
from manta.workers.parallel.data.elastic_sums import shared_leaves, sum_of_halves


class Validation:
    """Measures the validation losses of one rank's engine together with all others."""

    def __init__(self, engine: Engine, batches: Batches, comm: Comm):
        self.engine, self.batches, self.comm = engine, batches, comm
        self._train = engine.spec.train

    def due(self, step: int) -> bool:
        """Whether validation losses are measured after committed step `step`."""
        every = self._train.validate_every
        return every > 0 and step % every == 0

    def losses(self) -> dict[str, float]:
        """The mean loss over the validation batches of each held-out text, in nats per token, by the name of its
        metric; the same on every rank. Raises PeerLost."""
        texts, (places, mine) = self.batches.held_out, self._loss_places()
        lengths = [1 + text.batches(self.engine.spec) * places for text in texts]
        together = torch.zeros(sum(lengths), dtype=torch.float64, device=self.comm.device)
        with self.comm.step.phase("validation"):
            for text, sums in zip(texts, together.split(lengths), strict=True):
                self._add(text, sums, places, mine)
            self.comm.all_reduce("world", together)
        sums_of_each = zip(texts, together.split(lengths), strict=True)
        losses = {text.metric: float(sum_of_halves(sums[1:]) / sums[0]) for text, sums in sums_of_each}
        self.comm.confirm()
        return losses

    def _add(self, text: HeldOut, sums: torch.Tensor, places: int, mine: range) -> None:
        """Add to `sums` what this rank knows of a text: its tokens, then the losses of each batch."""
        losses = sums[1:].view(-1, places)
        for index in range(len(losses)):
            losses_m, tokens = self.engine.pipeline.evaluate(self.batches.validation(text, index))
            losses[index, mine.start : mine.stop] = losses_m if len(mine) == len(losses_m) else losses_m.sum()
            sums[0] += tokens

    def _loss_places(self) -> tuple[int, range]:
        """How many numbers make up the loss of a validation batch, and which of them this replica knows: one for every
        micro-batch if the result must not depend on the number of replicas, otherwise a single sum."""
        if self._train.deterministic == "layout":
            return 1, range(1)
        return shared_leaves(self.engine.spec, self._train.global_batch_size, self.comm.index("data"))
