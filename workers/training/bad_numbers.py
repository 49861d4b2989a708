"""Which steps have bad numbers, and how the job responds. Pure Python.

A step is bad if its loss or gradient norm is not finite, or is a spike: far above those of the preceding steps. All
ranks decide alike: from the step's statistics, on which they agree, and from a `NumericsHistory`, which is stored
together with the state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from manta.workers.config import RecoveryConfig

NORMAL = 1.4826
"""Standard deviation of a normal distribution, in units of the median distance from its median."""
MIN_DEVIATION = 0.05
"""Minimum deviation, as a fraction of the median: where a number hardly moves, not every small step is a spike."""

NO_LIMITS = (math.inf, math.inf)

Kind = Literal["not_finite", "spike"]
Policy = Literal["report", "skip", "roll_back", "fail"]


@dataclass(frozen=True)
class RollBack:
    """One return to an earlier step. Whatever the job resumes from, the samples that it skipped are not used again."""

    step: int
    """The bad step, which was not committed."""
    back_to: int
    """The committed step that the job returned to."""
    samples: tuple[range, ...]
    """Samples of the bad step, which are skipped from then on."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; a range of samples as [first, one past the last]."""
        ranges = [[sample.start, sample.stop] for sample in self.samples]
        return {"bad_step": self.step, "back_to": self.back_to, "samples": ranges}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RollBack:
        """The inverse of `to_json`; other keys are ignored."""
        return cls(document["bad_step"], document["back_to"], tuple(range(*each) for each in document["samples"]))


@dataclass(frozen=True)
class NumericsHistory:
    """What later decisions depend on, as of one committed step."""

    recent: tuple[tuple[float, float], ...] = ()
    """(Loss, gradient norm) of the last steps, oldest first."""
    roll_backs: tuple[RollBack, ...] = ()
    """All roll backs, by step."""

    def with_step(self, loss: float, grad_norm: float, window: int) -> NumericsHistory:
        """With one more step; keeps the last `window`. Values that are not finite say nothing about later steps and are
        left out; a committed spike is included, so that a new level that persists does not count as a spike for
        ever."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self
        return NumericsHistory((*self.recent, (loss, grad_norm))[-window:], self.roll_backs)

    def with_roll_backs(self, roll_backs: Iterable[RollBack]) -> NumericsHistory:
        """With these roll backs added."""
        return NumericsHistory(self.recent, merged_roll_backs((*self.roll_backs, *roll_backs)))

    @property
    def skipped_samples(self) -> list[range]:
        """The samples of all roll backs."""
        return [sample for roll_back in self.roll_backs for sample in roll_back.samples]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; floats keep their bits."""
        return {"recent": [list(pair) for pair in self.recent], "roll_backs": [r.to_json() for r in self.roll_backs]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> NumericsHistory:
        """The inverse of `to_json`."""
        recent = tuple((float(loss), float(norm)) for loss, norm in document["recent"])
        return cls(recent, merged_roll_backs(RollBack.from_json(each) for each in document["roll_backs"]))


def merged_roll_backs(roll_backs: Iterable[RollBack]) -> tuple[RollBack, ...]:
    """Each roll back once, in an order that depends only on the roll backs. Two that skipped the same samples are the
    same: one of them was repeated after a restart, when there may have been no copy of an equally early step."""
    by_samples: dict[tuple[range, ...], RollBack] = {}
    for roll_back in sorted(roll_backs, key=lambda roll_back: (roll_back.step, roll_back.back_to)):
        by_samples.setdefault(roll_back.samples, roll_back)
    return tuple(sorted(by_samples.values(), key=lambda each: (each.step, [(r.start, r.stop) for r in each.samples])))


def merged_histories(histories: Sequence[NumericsHistory]) -> NumericsHistory:
    """The history that all ranks continue with, given each rank's history as of the same committed step."""
    recent = next((history.recent for history in histories if history.recent), ())
    return NumericsHistory(recent).with_roll_backs(
        roll_back for history in histories for roll_back in history.roll_backs
    )


def limits(history: NumericsHistory, recovery: RecoveryConfig) -> tuple[float, float]:
    """Largest loss and gradient norm of the next step that do not count as a spike; infinite if no step is judged."""
    spike = recovery.spike
    if spike.policy == "ignore" or len(history.recent) < spike.window:
        return NO_LIMITS
    losses, norms = zip(*history.recent, strict=True)
    norm_limit = math.inf if spike.grad_norm_deviations is None else limit(norms, spike.grad_norm_deviations)
    return limit(losses, spike.loss_deviations), norm_limit


def limit(values: Sequence[float], deviations: float) -> float:
    """The largest value that is not far above `values`: this many deviations above their median."""
    middle = statistics.median(values)
    spread = NORMAL * statistics.median(abs(value - middle) for value in values)
    return middle + deviations * max(spread, MIN_DEVIATION * abs(middle))


@dataclass(frozen=True)
class BadStep:
    """A step with bad numbers."""

    kind: Kind
    policy: Policy
    """The job's policy for this case."""
    sentence: str
    """What is wrong with it, for people."""


def judge(
    recovery: RecoveryConfig, step: int, loss: float, grad_norm: float, bounds: tuple[float, float]
) -> BadStep | None:
    """What is wrong with a step of these numbers, whose limits were `bounds`; None for a good step."""
    sentence = f"step {step} has loss {loss:.6g} and gradient norm {grad_norm:.6g}"
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return BadStep("not_finite", recovery.nonfinite, sentence)
    if recovery.spike.policy == "ignore" or (loss <= bounds[0] and grad_norm <= bounds[1]):
        return None
    name, most = ("loss", bounds[0]) if loss > bounds[0] else ("gradient norm", bounds[1])
    sentence += f", a {name} above the {most:.6g} that the last {recovery.spike.window} steps allow"
    return BadStep("spike", recovery.spike.policy, sentence)


def roll_back_target(copies: Iterable[int], step: int, steps: int) -> int:
    """The committed step to return to from bad step `step`: of those in `copies` the newest that undoes at least
    `steps` committed ones, otherwise the oldest. `copies` is not empty."""
    ascending = sorted(copies)
    early_enough = [each for each in ascending if each <= step - 1 - steps]
    return early_enough[-1] if early_enough else ascending[0]
