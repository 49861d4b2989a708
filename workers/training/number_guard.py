"""What a rank stores and does because of bad numbers; which are bad, and what follows, is in `bad_numbers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manta.workers.comm.comm import Comm
from manta.workers.config import RecoveryConfig
from manta.workers.engine import Engine
from manta.workers.errors import NonFiniteError, SpikeError
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.snapshot.state_copy import HostCopies
from manta.workers.training.bad_numbers import (
    NO_LIMITS,
    BadStep,
    NumericsHistory,
    RollBack,
    judge,
    limits,
    merged_histories,
    roll_back_target,
)


class NumberGuard:
    """Judges the steps of one rank, and restores its state. All ranks call the same methods at the same steps."""

    def __init__(self, recovery: RecoveryConfig, engine: Engine, comm: Comm):
        self.recovery, self.engine, self.comm = recovery, engine, comm
        self.history = NumericsHistory()
        """As of the last committed step."""
        self.copies: HostCopies[NumericsHistory] | None = None
        """Earlier states, each with the history as of its step; None if no policy is roll_back."""
        if recovery.rolls_back:
            self.copies = HostCopies(engine.state())
        self._limits = NO_LIMITS

    @property
    def active(self) -> bool:
        """Whether `history` matters to this job."""
        return self.recovery.needs_history

    def restored(self, step: int, history: NumericsHistory | None, known: Iterable[RollBack]) -> list[RollBack]:
        """The state is that of committed step `step`, which came with `history`; None: this process never lost either.
        `known`: roll backs that the control plane knows. Agrees with the other ranks on what applies from here on;
        returns the roll backs that were not `known`. Raises PeerLost."""
        if not self.active:
            return []
        known = list(known)
        if history is not None:
            self.history = history.with_roll_backs(self.history.roll_backs)
        self.history = self.history.with_roll_backs(known)
        copies = [] if self.copies is None else [copy for copy in self.copies.steps if copy <= step]
        own = _Known(self.history, copies)
        agreed = self.comm.shared_work.together(lambda: own, _agreed, (_Known, _Known), self.comm.progress)
        self.history, common = agreed.history, agreed.copies
        if self.copies is not None:
            self.copies.forget(*(copy for copy in self.copies.steps if copy not in common))
            if not common:
                self.copies.start(step, self.history)
        heard = {each.samples for each in known}
        return [roll_back for roll_back in self.history.roll_backs if roll_back.samples not in heard]

    def begin_step(self) -> None:
        """Make the next step update nothing if its numbers are above their limits."""
        self._limits = limits(self.history, self.recovery)
        self.engine.optimizer.limits = NO_LIMITS if self.recovery.spike.policy == "report" else self._limits

    def judge(self, step: int, statistics: StepStatistics) -> BadStep | None:
        """What is wrong with a step; None for a good step."""
        return judge(self.recovery, step, statistics.loss, statistics.grad_norm, self._limits)

    def committed(self, step: int, statistics: StepStatistics) -> None:
        """The step is committed."""
        if self.active:
            if self.recovery.spike.policy != "ignore":
                window = self.recovery.spike.window
                self.history = self.history.with_step(statistics.loss, statistics.grad_norm, window)
            if self.copies is not None and step % self.recovery.roll_back_steps == 0:
                self.copies.start(step, self.history)

    def finish(self) -> None:
        """The state is about to change: wait for the copy that was begun."""
        if self.copies is not None:
            self.copies.finish()

    def roll_back(self, step: int, samples: Sequence[range], bad: BadStep) -> RollBack:
        """Restore the state from before `step`, which is bad and would have used `samples`. All ranks together publish
        the contents of the parameters. Raises NonFiniteError or SpikeError if that was done often enough."""
        assert self.copies is not None
        before = self.history.roll_backs
        if len(before) >= self.recovery.max_roll_backs:
            raise error_of(bad)(
                f"{bad.sentence}; the job has rolled back {len(before)} times "
                "(recovery.max_roll_backs). Lower train.optimizer.learning_rate, or look at these samples"
            )
        copies = self.copies.steps
        target = roll_back_target(copies, step, self.recovery.roll_back_steps)
        roll_back = RollBack(step, target, tuple(samples))
        self.history = self.copies.load(target).with_roll_backs((*before, roll_back))
        self.copies.forget(*(copy for copy in copies if copy > target))
        self.engine.optimizer.publish_parameters()
        self.engine.optimizer.set_step(target)
        return roll_back

    def close(self) -> None:
        """End the thread."""
        if self.copies is not None:
            self.copies.close()


def error_of(bad: BadStep) -> type[NonFiniteError | SpikeError]:
    """The error with which a job fails because of it."""
    return NonFiniteError if bad.kind == "not_finite" else SpikeError


@dataclass(frozen=True)
class _Known:
    """What a rank knows, and what all ranks agree on."""

    history: NumericsHistory
    copies: list[int]
    """Steps of the copies."""


def _agreed(known: list[_Known]) -> list[_Known]:
    """For each rank: the history that applies, and the steps of the copies that all ranks have."""
    common = set.intersection(*(set(each.copies) for each in known))
    return [_Known(merged_histories([each.history for each in known]), sorted(common))] * len(known)
