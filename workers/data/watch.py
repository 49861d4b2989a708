"""Reports that a rank is preparing its data: to its agent, which would otherwise take it for hung, and to users."""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.data.prepare import Corpus
from manta.workers.data.token_cache import Watcher
from manta.workers.errors import DataError
from manta.workers.training.reporter import Reporter


class DataWatch(Watcher):
    """The watcher of a rank."""

    def __init__(self, comm: Comm, reporter: Reporter):
        self._comm, self._reporter = comm, reporter

    def alive(self) -> None:
        """Record progress where the rank's agent reads it."""
        self._comm.step.enter("preparing")

    def report(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """Report an event of the job."""
        self.alive()
        self._reporter.event(kind, 0, message, data)


def check_same_tokens(corpus: Corpus, comm: Comm) -> None:
    """Raise DataError unless all ranks have the same tokens, or read files of the same sizes: nodes without shared
    storage may have different ones. Raises PeerLost."""
    if comm.size("world") == 1:
        return
    words = [float(int(corpus.digest[at : at + 8], 16)) for at in range(0, 64, 8)]
    sums = torch.tensor([*words, *(-word for word in words)], dtype=torch.float64, device=comm.device)
    comm.all_reduce("world", sums, largest=True)
    highest, lowest = sums[:8], -sums[8:]
    same = torch.equal(highest, lowest)
    comm.confirm()
    if not same:
        raise DataError(
            "the ranks of this job have different tokens: the files of the corpus, or of the tokenizer, are not the "
            "same on all of its nodes, or were changed since the job began"
        )
