"""Rules across the fields of a JobSpec about mixture of experts: their choice, widths, and ranks. Pure Python.

Each rule is a function of the spec that yields problems, as in `rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from manta.workers.config import JobSpec, ModelConfig, ParallelConfig
from manta.workers.spec.divisors import nearest_divisor, nearest_multiple
from manta.workers.spec.problems import Problem


def dense_widths(model: ModelConfig) -> tuple[int, ...]:
    """Inner width of the MLP of layers without experts; empty if every layer has experts."""
    return (model.ffn_size,) if len(model.expert_layers) < model.layers else ()


def inner_widths(spec: JobSpec) -> tuple[int, ...]:
    """Inner widths that are split over tensor ranks: of MLPs, experts unless they are whole, and shared experts."""
    moe, layout = spec.model.moe, spec.layout
    experts = () if moe is None or layout.expert_split < layout.tensor else (moe.ffn_hidden_size,)
    shared = () if moe is None or not moe.shared else (moe.shared_size,)
    return (*dense_widths(spec.model), *experts, *shared)


def replica_unit(layout: ParallelConfig) -> int:
    """The number of replicas is a multiple of this, so that expert groups are complete: the ranks of a group that are
    context ranks share a replica."""
    return layout.exchange_size // math.gcd(layout.exchange_size, layout.context)


def _layers_may_have_experts(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.moe is None:
        return
    if model.family == "custom":
        yield Problem("model.moe", "a custom model builds its own layers; this is for built-in families", "null")
    elif not model.parts.gated_mlp:
        problem = f"{model.family} has no gated MLP, which experts are; llama, qwen and deepseek may have experts"
        yield Problem("model.moe", problem, "null")
    elif model.bias:
        yield Problem("model.bias", "not supported with model.moe: experts have no biases", "false")


def _some_layer_has_experts(spec: JobSpec) -> Iterator[Problem]:
    model, moe = spec.model, spec.model.moe
    if moe is None or model.expert_layers:
        return
    if moe.every > model.layers:
        problem = f"no layer would have experts: model.layers is {model.layers}"
        yield Problem("model.moe.every", problem, str(model.layers))
    else:
        last = model.layers // moe.every * moe.every - 1
        problem = f"no layer after the first {moe.first_dense} would have experts: model.layers is {model.layers}"
        yield Problem("model.moe.first_dense", problem, str(last))


def _tokens_can_choose(spec: JobSpec) -> Iterator[Problem]:
    moe = spec.model.moe
    if moe is None:
        return
    if moe.per_token > moe.experts:
        problem = f"per_token ({moe.per_token}) must be at most experts ({moe.experts})"
        yield Problem("model.moe.per_token", problem, str(moe.experts))
    elif moe.experts % moe.groups:
        problem = f"groups ({moe.groups}) must divide experts ({moe.experts})"
        yield Problem("model.moe.groups", problem, str(nearest_divisor(moe.experts, moe.groups)))
    elif moe.groups_per_token > moe.groups:
        problem = f"groups_per_token ({moe.groups_per_token}) must be at most groups ({moe.groups})"
        yield Problem("model.moe.groups_per_token", problem, str(moe.groups))
    elif moe.groups > 1 and moe.per_token > (reachable := moe.experts // moe.groups * moe.groups_per_token):
        problem = (
            f"{moe.groups_per_token} of {moe.groups} groups have {reachable} experts, fewer than per_token "
            f"({moe.per_token})"
        )
        yield Problem("model.moe.groups_per_token", problem, str(-(-moe.per_token * moe.groups // moe.experts)))
    if moe.per_token == 1 and moe.normalise:
        problem = "divided by itself, the weight of a token's only expert is always 1, so the router would not learn"
        yield Problem("model.moe.normalise", problem, "false")


def _keys_of_experts_have_effect(spec: JobSpec) -> Iterator[Problem]:
    moe = spec.model.moe
    if moe is None:
        return
    if not moe.shared:
        if moe.shared_ffn_hidden_size is not None:
            yield Problem("model.moe.shared_ffn_hidden_size", "has no effect: model.moe.shared is 0", "null")
        if moe.shared_gate:
            yield Problem("model.moe.shared_gate", "has no effect: model.moe.shared is 0", "false")
    default = type(moe.balance).model_fields["weight"].default
    if moe.balance.loss == "none" and moe.balance.weight != default:
        yield Problem("model.moe.balance.weight", "has no effect: model.moe.balance.loss is none", str(default))


def _widths_are_split(spec: JobSpec) -> Iterator[Problem]:
    moe, tensor = spec.model.moe, spec.layout.tensor
    if moe is None or spec.model.heads % tensor:
        return  # the tensor size is wrong first
    are_split = spec.layout.expert_split == tensor
    keys = {"ffn_hidden_size": moe.ffn_hidden_size} if are_split else {}
    if moe.shared and not (are_split and moe.shared_ffn_hidden_size is None):  # which follows from the other
        keys["shared_ffn_hidden_size"] = moe.shared_size
    for key, width in keys.items():
        if width % tensor:
            problem = f"{key} ({width}) must be a multiple of parallel.tensor ({tensor}), which shares each expert"
            yield Problem(f"model.moe.{key}", problem, str(nearest_multiple(tensor, width)))


def _experts_are_spread(spec: JobSpec) -> Iterator[Problem]:
    layout, moe, size = spec.layout, spec.model.moe, spec.layout.expert_size
    if layout.expert_dispatch is not None and layout.exchange_size == 1:
        why = "parallel.expert is 1" if size == 1 else f"tensor ranks, which have all {size} parts, have all tokens"
        yield Problem("parallel.expert_dispatch", f"has no effect: {why}", "null")
    if moe is None:
        if size > 1:
            yield Problem("parallel.expert", "has no effect: the model has no experts (model.moe)", "null")
        if layout.expert_tensor is not None:
            yield Problem("parallel.expert_tensor", "has no effect: the model has no experts (model.moe)", "null")
        return
    of_whole = None if layout.expert_tensor is None else _whole_experts_problem(layout, moe.experts)
    if of_whole is not None:
        yield of_whole
    if of_whole is not None or size == 1:
        return
    unit = layout.tensor // layout.expert_split
    nearest = str(unit * nearest_divisor(math.gcd(layout.holders, moe.experts // unit), max(1, size // unit)))
    if layout.holders % layout.exchange_size:
        ranks, count = "parallel.data x context" if layout.context > 1 else "parallel.data", layout.holders * unit
        ranks, over = (ranks, "replicas") if unit == 1 else (f"{ranks} x tensor", "replicas and tensor ranks")
        problem = f"expert ({size}) must divide {ranks} ({count}): experts are spread over {over}"
        yield Problem("parallel.expert", problem, nearest)
    elif moe.experts % size:
        problem = f"expert ({size}) must divide model.moe.experts ({moe.experts}): all ranks have equally many"
        yield Problem("parallel.expert", problem, nearest)
    else:
        yield from _sizes_have_whole_groups(spec)


def _whole_experts_problem(layout: ParallelConfig, experts: int) -> Problem | None:
    """Why tensor ranks cannot have different whole experts, if they cannot."""
    tensor, size = layout.tensor, layout.expert_size
    if tensor == 1:
        return Problem("parallel.expert_tensor", "has no effect: parallel.tensor is 1", "null")
    if experts % tensor:
        problem = f"model.moe.experts ({experts}) must be a multiple of parallel.tensor ({tensor}), whose ranks have"
        return Problem("parallel.expert_tensor", f"{problem} different experts", "null")
    if size % tensor:
        problem = f"expert ({size}) must be a multiple of parallel.tensor ({tensor}): with expert_tensor 1, experts are"
        return Problem("parallel.expert", f"{problem} spread over tensor ranks too", str(tensor))
    return None


def _sizes_have_whole_groups(spec: JobSpec) -> Iterator[Problem]:
    data, unit, elastic = spec.layout.data, replica_unit(spec.layout), spec.elastic
    least = None if elastic.reshape else elastic.min_data  # below, experts are spread over fewer ranks
    for key, limit in (("min_data", least), ("max_data", elastic.max_data)):
        if limit is not None and limit % unit:
            problem = f"must be a multiple of {unit}: replicas come and go in whole groups of parallel.expert"
            down = limit // unit * unit
            nearest = min(data, down + unit) if key == "min_data" else max(data, down)
            yield Problem(f"elastic.{key}", f"{problem} ({spec.layout.expert_size})", str(nearest))


def _spread_experts_fit(spec: JobSpec) -> Iterator[Problem]:
    layout, size = spec.layout, spec.layout.expert_size
    if size == 1:
        return
    if layout.zero >= 2:
        rule = f"zero: {layout.zero} is not supported yet with parallel.expert {size}: fewer ranks hold an expert"
        yield Problem("parallel.zero", rule, "1")
    if spec.train.deterministic == "elastic":
        rule = f"not supported yet with parallel.expert {size}: an expert's sum depends on how replicas are grouped"
        yield Problem("train.deterministic", rule, "layout")


EXPERT_RULES = (
    _layers_may_have_experts,
    _some_layer_has_experts,
    _tokens_can_choose,
    _keys_of_experts_have_effect,
    _widths_are_split,
    _experts_are_spread,
    _spread_experts_fit,
)
