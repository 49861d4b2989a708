"""Names of a job's metrics in addition to those that every job has. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VALIDATION_LOSS = "validation_loss"
Z_LOSS = "z_loss"
BALANCE_LOSS = "balance_loss"
EXPERT_LOAD = "expert_load"


def validation_loss(name: str | None) -> str:
    """The metric of the validation set with that name; None: of the corpus's own held-out part."""
    return VALIDATION_LOSS if name is None else f"{VALIDATION_LOSS}_{name}"


def validation_losses(spec: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of a job's validation sets, by name, in order. `spec`: its JobSpec as JSON, possibly stored by
    another release."""
    data = spec.get("data")
    sets = data.get("validation") if isinstance(data, Mapping) else None
    names = [each.get("name") for each in sets or () if isinstance(each, Mapping)] if isinstance(sets, list) else []
    return {name: validation_loss(name) for name in names if isinstance(name, str)}


def of_job(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that depend on the job's spec."""
    train = spec.get("train")
    more = (Z_LOSS,) if isinstance(train, Mapping) and train.get(Z_LOSS) else ()
    return (*validation_losses(spec).values(), *more, *_of_experts(spec))


def _of_experts(spec: Mapping[str, Any]) -> tuple[str, ...]:
    model = spec.get("model")
    moe = model.get("moe") if isinstance(model, Mapping) else None
    if not isinstance(moe, Mapping):
        return ()
    balance = moe.get("balance")
    balances = isinstance(balance, Mapping) and balance.get("loss") != "none" and balance.get("weight") != 0
    return (EXPERT_LOAD, *((BALANCE_LOSS,) if balances or moe.get("router_z_loss") else ()))
