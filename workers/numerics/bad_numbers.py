"""Which steps have bad numbers, and what is done about them. Pure Python.

A step is bad when its loss or gradient norm is not finite, or stands out from those of the steps before. All ranks
decide alike: from the step's statistics, which they agree on, and from `Numbers`, which goes with the state wherever
that is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workers.config import RecoveryConfig

NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median distances from its median."""
LEAST_DEVIATION = 0.05
"""Of the median: where a number hardly moves, not every small step away from it is a spike."""

NO_LIMITS = (math.inf, math.inf)

Kind = Literal["not_finite", "spike"]
Policy = Literal["report", "skip", "roll_back", "fail"]


@dataclass(frozen=True)
class RollBack:
    """One return to an earlier step. What it passed over is never used again, whatever the job resumes from."""

    step: int
    """The bad step, which did not happen."""
    back_to: int
    """The committed step that was gone back to."""
    samples: tuple[range, ...]
    """What that step would have used."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; a range of samples as [first, one past the last]."""
        ranges = [[each.start, each.stop] for each in self.samples]
        return {"bad_step": self.step, "back_to": self.back_to, "samples": ranges}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RollBack:
        """From what `to_json` makes; other keys do not matter."""
        return cls(document["bad_step"], document["back_to"], tuple(range(*each) for each in document["samples"]))


@dataclass(frozen=True)
class Numbers:
    """What later decisions depend on, as of one committed step."""

    recent: tuple[tuple[float, float], ...] = ()
    """(Loss, gradient norm) of the last steps, oldest first."""
    roll_backs: tuple[RollBack, ...] = ()
    """All of them, by step."""

    def after(self, loss: float, grad_norm: float, window: int) -> Numbers:
        """With one more step. What is not finite says nothing about later steps; a spike that was let pass does, so
        that a level that stays is no spike for ever."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self
        return Numbers((*self.recent, (loss, grad_norm))[-window:], self.roll_backs)

    def knowing(self, roll_backs: Iterable[RollBack]) -> Numbers:
        """With these roll backs too."""
        return Numbers(self.recent, together((*self.roll_backs, *roll_backs)))

    @property
    def passed_over(self) -> list[range]:
        """The samples of all roll backs."""
        return [each for roll_back in self.roll_backs for each in roll_back.samples]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; floats keep their bits."""
        return {"recent": [list(pair) for pair in self.recent], "roll_backs": [r.to_json() for r in self.roll_backs]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Numbers:
        """From what `to_json` makes."""
        recent = tuple((float(loss), float(norm)) for loss, norm in document["recent"])
        return cls(recent, together(RollBack.from_json(each) for each in document["roll_backs"]))


def together(roll_backs: Iterable[RollBack]) -> tuple[RollBack, ...]:
    """Each roll back once, in an order that depends on nothing but the roll backs. Two that passed over the same
    samples are the same: one of them was made again after a restart, from which the job may have reached less far
    back."""
    by_samples: dict[tuple[range, ...], RollBack] = {}
    for each in sorted(roll_backs, key=lambda each: (each.step, each.back_to)):
        by_samples.setdefault(each.samples, each)
    return tuple(sorted(by_samples.values(), key=lambda each: (each.step, [(r.start, r.stop) for r in each.samples])))


def agreed(known: Sequence[Numbers]) -> Numbers:
    """What all ranks go on with, from what each of them knows of the same committed step."""
    recent = next((numbers.recent for numbers in known if numbers.recent), ())
    return Numbers(recent).knowing(each for numbers in known for each in numbers.roll_backs)


def limits(numbers: Numbers, recovery: RecoveryConfig) -> tuple[float, float]:
    """Largest loss and gradient norm of the next step that are no spike; infinite where no step is judged."""
    spike = recovery.spike
    if spike.policy == "ignore" or len(numbers.recent) < spike.window:
        return NO_LIMITS
    losses, norms = zip(*numbers.recent, strict=True)
    norm_limit = math.inf if spike.grad_norm_deviations is None else limit(norms, spike.grad_norm_deviations)
    return limit(losses, spike.loss_deviations), norm_limit


def limit(values: Sequence[float], deviations: float) -> float:
    """What stands out from `values`: so many deviations above their median."""
    middle = statistics.median(values)
    spread = NORMAL * statistics.median(abs(value - middle) for value in values)
    return middle + deviations * max(spread, LEAST_DEVIATION * abs(middle))


@dataclass(frozen=True)
class Bad:
    """A step with bad numbers."""

    kind: Kind
    policy: Policy
    sentence: str
    """What is wrong with it."""


def judge(
    recovery: RecoveryConfig, step: int, loss: float, grad_norm: float, bounds: tuple[float, float]
) -> Bad | None:
    """What is wrong with a step of these numbers, whose limits were `bounds`; None for a good one."""
    told = f"step {step} has loss {loss:.6g} and gradient norm {grad_norm:.6g}"
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return Bad("not_finite", recovery.nonfinite, told)
    if recovery.spike.policy == "ignore" or (loss <= bounds[0] and grad_norm <= bounds[1]):
        return None
    name, most = ("loss", bounds[0]) if loss > bounds[0] else ("gradient norm", bounds[1])
    told += f", a {name} above the {most:.6g} that the last {recovery.spike.window} steps let expect"
    return Bad("spike", recovery.spike.policy, told)


def rolls_back(recovery: RecoveryConfig) -> bool:
    """Whether any policy is to roll back, so that earlier states must be kept."""
    return "roll_back" in (recovery.nonfinite, recovery.spike.policy)


def remembers(recovery: RecoveryConfig) -> bool:
    """Whether `Numbers` are of any use to the job."""
    return rolls_back(recovery) or recovery.spike.policy != "ignore"


def back_to(kept: Iterable[int], step: int, steps: int) -> int:
    """The committed step to go back to from bad step `step`: of those `kept` the newest that undoes at least `steps`
    committed ones, else the oldest. `kept` is not empty."""
    held = sorted(kept)
    far = [each for each in held if each <= step - 1 - steps]
    return far[-1] if far else held[0]
