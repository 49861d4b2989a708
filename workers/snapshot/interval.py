"""The snapshot interval: how many steps lie between two snapshots.

With `auto` it is 1, unless making sure of the copies holds the training thread up; then it is so long that the thread
hardly notices. All ranks use the same interval: it follows from the slowest rank's numbers, which they exchange at
fixed steps.

What is promised: while the interval in force is k (`snapshot_every_steps` in the row of the last committed step), the
death of processes costs at most k committed steps, whenever they die. Where the interval has changed since the newest
snapshot, each earlier one adds at most itself less one: from k to n, a death before the first snapshot under n is whole
costs at most k - 1 + n steps. That follows from these:

- The steps that are multiples of k are snapshotted, and the snapshot of one is whole on all ranks before any rank
  commits a later step. So the newest step s that any rank has committed is at most k steps after the newest snapshot
  that all ranks have: k where s is itself a multiple of k whose snapshot is not complete yet.
- While a checkpoint is written its snapshot is held, and the steps after it take turns in the other slot (decision
  0025): then the death of processes may cost the steps since that one, and the row says so where those are more than k.
- The interval changes only after a multiple of AGREE_EVERY was committed, which may be up to k - 1 steps after the last
  snapshot, and the next one is due at most n steps later.

A generation begins with a snapshot of the step that it starts from on every rank, and with the interval 1 for `auto`.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

import torch

from manta.workers.accounting.state_costs import steps_between
from manta.workers.comm.comm import Comm

AGREE_EVERY = 16
"""Steps between two exchanges of the numbers."""


class SnapshotInterval:
    """Which steps are snapshotted. All ranks call the same methods at the same steps."""

    def __init__(self, every: int | Literal["auto"]):
        """`every`: as `checkpoint.snapshot_every_steps`; 0: no step is snapshotted."""
        self._auto = every == "auto"
        self.every: int = 1 if isinstance(every, str) else every
        """The interval in force, in steps; 0: there are no snapshots."""
        self._stalls: deque[float] = deque(maxlen=AGREE_EVERY)
        self._steps: deque[float] = deque(maxlen=AGREE_EVERY)

    def due(self, step: int) -> bool:
        """Whether committed step `step` is to be snapshotted."""
        return self.every > 0 and step % self.every == 0

    def restart(self) -> None:
        """A generation begins: all ranks start without measurements."""
        if self._auto:
            self.every = 1
        self._stalls.clear()
        self._steps.clear()

    def note_stall(self, seconds: float) -> None:
        """How long a snapshot held up the training thread."""
        self._stalls.append(seconds)

    def note_step(self, step: int, seconds: float, comm: Comm) -> None:
        """The time of step `step`, after it was decided whether to snapshot it. Raises PeerLost."""
        self._steps.append(seconds)
        if not self._auto or step % AGREE_EVERY or len(self._steps) < AGREE_EVERY:
            return  # the first steps of a generation touch all memory for the first time, and are not typical
        medians = [statistics.median(self._stalls or [0.0]), statistics.median(self._steps)]
        shared = torch.tensor(medians, dtype=torch.float64, device=comm.device)
        comm.all_reduce("world", shared, largest=True)
        agreed = shared.tolist()
        comm.confirm()
        self.every = steps_between(*agreed)
