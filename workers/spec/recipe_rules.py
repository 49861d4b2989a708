"""Rules across the fields of a JobSpec about training recipes: learning rates, decay, frozen parameters, validation.
Pure Python.

Each rule is a function of the spec that yields problems, as in `rules.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import ADAPTED, layer_table, lora_targets
from manta.workers.spec.parameters import frozen_names, matching, parameter_names
from manta.workers.spec.problems import Problem
from manta.workers.training.learning_rate import decay_steps

SECTION = "train.optimizer"


def _learning_rates_ordered(spec: JobSpec) -> Iterator[Problem]:
    optimizer = spec.train.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate and optimizer.schedule != "constant":
        yield Problem(
            f"{SECTION}.min_learning_rate",
            f"min_learning_rate ({optimizer.min_learning_rate}) must be at most learning_rate "
            f"({optimizer.learning_rate})",
            str(optimizer.learning_rate),
        )


def _warmup_fits(spec: JobSpec) -> Iterator[Problem]:
    optimizer, steps = spec.train.optimizer, spec.train.steps
    if optimizer.warmup_steps > steps:
        problem = f"warmup_steps ({optimizer.warmup_steps}) must be at most train.steps ({steps})"
        yield Problem(f"{SECTION}.warmup_steps", problem, str(steps))
    elif optimizer.schedule == "inverse-sqrt" and not optimizer.warmup_steps:
        problem = "inverse-sqrt falls with the square root of warmup_steps / step, so it needs a warm-up"
        yield Problem(f"{SECTION}.warmup_steps", problem, str(max(1, steps // 100)))


def _decay_fits(spec: JobSpec) -> Iterator[Problem]:
    """Checks the keys of schedule wsd."""
    optimizer, steps = spec.train.optimizer, spec.train.steps
    given = [key for key in ("decay_steps", "decay_fraction") if getattr(optimizer, key) is not None]
    given += ["decay_shape"] if optimizer.decay_shape != "linear" else []
    if optimizer.schedule != "wsd":
        if given:
            problem = f"{optimizer.schedule} does not use {' or '.join(given)}: only wsd does"
            yield Problem(f"{SECTION}.schedule", problem, "wsd")
        return
    if "decay_steps" in given and "decay_fraction" in given:
        yield Problem(f"{SECTION}.decay_fraction", "decay_steps already sets the length of the decay", "null")
        return
    decay, left = decay_steps(optimizer, steps), steps - optimizer.warmup_steps
    if left < 0 or decay <= left:
        return  # reported by the rule about the warm-up
    what = f"the decay ({decay} steps) and warmup_steps ({optimizer.warmup_steps}) exceed train.steps ({steps})"
    if left == 0:
        yield Problem(f"{SECTION}.warmup_steps", what, str(max(0, steps - decay)))
    elif optimizer.decay_steps is not None:
        yield Problem(f"{SECTION}.decay_steps", what, str(left))
    else:
        yield Problem(f"{SECTION}.decay_fraction", what, _fraction_of(left, steps))


def _fraction_of(part: int, whole: int) -> str:
    """`part` / `whole`, rounded down to as few digits as suffice."""
    digits = next(n for n in range(2, 12) if round(whole * math.floor(part / whole * 10**n) / 10**n) > 0)
    return f"{math.floor(part / whole * 10**digits) / 10**digits:.{digits}f}"


def _decayed_once(spec: JobSpec) -> Iterator[Problem]:
    groups = spec.train.optimizer.weight_decay_groups
    if len(set(groups)) < len(groups):
        once = f"[{', '.join(dict.fromkeys(groups))}]"
        yield Problem(f"{SECTION}.weight_decay_groups", "a group is named twice", once)


def _frozen_parts_are_there(spec: JobSpec) -> Iterator[Problem]:
    patterns = spec.train.frozen
    if not patterns or spec.train.lora is not None:
        return
    if not spec.model.is_counted:
        problem = "not supported for custom models, whose parameters are unknown"
        yield Problem("train.frozen", problem, "[]", unsupported=True)
        return
    names = parameter_names(spec.model)
    for at, pattern in enumerate(patterns):
        if not matching(pattern, names):
            few = [name for name in names if ".experts." not in name or ".experts.0." in name]  # all are alike
            parts = sorted({".".join(name.split(".")[:end]) for name in few for end in range(1, name.count(".") + 2)})
            nearest = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)[0]
            yield Problem(f"train.frozen.{at}", f"the model has no parameter {pattern}", nearest)
    if len(frozen_names(spec)) == len(names):
        yield Problem("train.frozen", "no parameter would be trained", "[embedding]")


def _adapters_fit(spec: JobSpec) -> Iterator[Problem]:
    model, lora = spec.model, spec.train.lora
    if lora is None:
        return
    if not model.is_counted:
        problem = "not supported yet for custom models, whose linear layers are unknown; supported: null"
        yield Problem("train.lora", problem, "null", unsupported=True)
        return
    if spec.train.frozen:
        yield Problem("train.frozen", "train.lora freezes the model already", "[]")
    known, targets = lora_targets(model), lora.targets or lora_targets(model)
    once = tuple(dict.fromkeys(targets))
    if lacking := [target for target in once if target not in known]:
        what = "with model.moe only attention is adapted" if model.moe else ""
        what = what or f"{model.family} has no {' and no '.join(lacking)}"
        problem = f"{what}; its targets are {', '.join(known)}"
        fitting = [target for target in once if target in known]
        yield Problem("train.lora.targets", problem, f"[{', '.join(fitting or known)}]")
        return
    if len(once) < len(targets):
        yield Problem("train.lora.targets", "a target is named twice", f"[{', '.join(once)}]")
    matrices = layer_table(model).logical_matrices
    shapes = {target: matrices[ADAPTED[target]] for target in targets}
    sides = {target: (weight.columns, rows.length * rows.blocks) for target, (weight, rows) in shapes.items()}
    smallest = min(targets, key=lambda target: min(sides[target]))
    if lora.rank > (most := min(sides[smallest])):
        problem = f"rank ({lora.rank}) must be at most {most}, the smaller side of the matrix of {smallest}"
        yield Problem("train.lora.rank", problem, str(most))


def _validation_has_data(spec: JobSpec) -> Iterator[Problem]:
    train, data = spec.train, spec.data
    if train.validate_every and not data.validation_fraction and not data.validation:
        problem = "validation needs data.validation_fraction above 0, or sets in data.validation"
        yield Problem("train.validate_every", problem, "0")
    if data.validation and not train.validate_every:
        problem = "data.validation lists sets, but with 0 their losses are never measured"
        yield Problem("train.validate_every", problem, str(max(1, train.steps // 10)))
    names = [each.name for each in data.validation]
    for at, name in enumerate(names):
        if name in names[:at]:
            free = next(f"{name}_{number}" for number in range(2, 100) if f"{name}_{number}" not in names)
            yield Problem(f"data.validation.{at}.name", f"another validation set is already named {name}", free)


RECIPE_RULES = (
    _learning_rates_ordered,
    _warmup_fits,
    _decay_fits,
    _decayed_once,
    _frozen_parts_are_there,
    _adapters_fit,
    _validation_has_data,
)
