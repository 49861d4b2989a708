"""What a rank keeps and does because of bad numbers; what is bad, and what follows from it, is in `bad_numbers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.comm.comm import Comm
from workers.config import RecoveryConfig
from workers.engine import Engine
from workers.errors import NonFiniteError, SpikeError
from workers.numerics.bad_numbers import (
    NO_LIMITS,
    Bad,
    Numbers,
    RollBack,
    agreed,
    back_to,
    judge,
    limits,
    remembers,
    rolls_back,
)
from workers.parallel.data.zero import StepStatistics
from workers.snapshot.host_copies import Copies


class NumberGuard:
    """Judges the steps of one rank, and brings its state back. All ranks call the same methods at the same steps."""

    def __init__(self, recovery: RecoveryConfig, engine: Engine, comm: Comm):
        self.recovery, self.engine, self.comm = recovery, engine, comm
        self.numbers = Numbers()
        """As of the last committed step."""
        self.copies = Copies(engine.state()) if rolls_back(recovery) else None
        self._bounds = NO_LIMITS

    @property
    def active(self) -> bool:
        """Whether `numbers` matter to this job."""
        return remembers(self.recovery)

    def restored(self, step: int, told: Numbers | None, known: Iterable[RollBack]) -> list[RollBack]:
        """The state is that of committed step `step`, with which came `told`; None: it never went away. `known`: roll
        backs that the control plane has heard of. Agrees with the other ranks on what holds from here on; returns the
        roll backs that were not `known`. Raises PeerLost."""
        if not self.active:
            return []
        known = list(known)
        if told is not None:
            self.numbers = told.knowing(self.numbers.roll_backs)
        self.numbers = self.numbers.knowing(known)
        mine = (self.numbers, [] if self.copies is None else [held for held in self.copies.steps if held <= step])
        self.numbers, common = self.comm.shared_work.together(lambda: mine, _agreed)
        if self.copies is not None:
            self.copies.forget(*(held for held in self.copies.steps if held not in common))
            if not common:
                self.copies.start(step, self.numbers)
        heard = {each.samples for each in known}
        return [each for each in self.numbers.roll_backs if each.samples not in heard]

    def begin_step(self) -> None:
        """Have the next step update nothing where its numbers are above their limits."""
        self._bounds = limits(self.numbers, self.recovery)
        self.engine.optimizer.limits = NO_LIMITS if self.recovery.spike.policy == "report" else self._bounds

    def judge(self, step: int, statistics: StepStatistics) -> Bad | None:
        """What is wrong with a step; None for a good one."""
        return judge(self.recovery, step, statistics.loss, statistics.grad_norm, self._bounds)

    def committed(self, step: int, statistics: StepStatistics) -> None:
        """The step is committed."""
        if self.active:
            window = self.recovery.spike.window if self.recovery.spike.policy != "ignore" else 0
            if window:
                self.numbers = self.numbers.after(statistics.loss, statistics.grad_norm, window)
            if self.copies is not None and step % self.recovery.roll_back_steps == 0:
                self.copies.start(step, self.numbers)

    def finish(self) -> None:
        """The state is about to change: make sure of the copy that was begun."""
        if self.copies is not None:
            self.copies.finish()

    def roll_back(self, step: int, samples: Sequence[range], bad: Bad) -> RollBack:
        """Bring the state back from `step`, which is bad and would have used `samples`. What the parameters hold is
        published by all ranks together. Raises NonFiniteError or SpikeError when that was done often enough."""
        assert self.copies is not None
        if len(self.numbers.roll_backs) >= self.recovery.max_roll_backs:
            raise error_of(bad)(
                f"{bad.sentence}; the job has rolled back {len(self.numbers.roll_backs)} times "
                "(recovery.max_roll_backs). Lower train.optimizer.learning_rate, or look at these samples"
            )
        held = self.copies.steps
        target = back_to(held, step, self.recovery.roll_back_steps)
        done = RollBack(step, target, tuple(samples))
        before = self.numbers.roll_backs
        self.numbers = self.copies.load(target).knowing((*before, done))
        self.copies.forget(*(each for each in held if each > target))
        self.engine.optimizer.publish_parameters()
        self.engine.optimizer.set_step(target)
        return done

    def close(self) -> None:
        """End the thread."""
        if self.copies is not None:
            self.copies.close()


def error_of(bad: Bad) -> type[NonFiniteError | SpikeError]:
    """What a job fails with because of it."""
    return NonFiniteError if bad.kind == "not_finite" else SpikeError


def _agreed(known: list[tuple[Numbers, list[int]]]) -> list[tuple[Numbers, list[int]]]:
    """For each rank: the numbers that hold, and the copies that all ranks have."""
    common = set.intersection(*(set(steps) for _, steps in known))
    return [(agreed([numbers for numbers, _ in known]), sorted(common))] * len(known)
