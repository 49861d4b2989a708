"""Requirements of 8-bit products and of CUDA graphs on a JobSpec. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

from manta.workers.config import JobSpec, LatentAttentionConfig, ModelConfig
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from manta.workers.spec.divisors import nearest_multiple
from manta.workers.spec.expert_rules import dense_widths
from manta.workers.spec.problems import Problem
from manta.workers.spec.sequence_runs import shortest_unit

UNIT = 16
"""All widths of 8-bit products must be multiples of this."""


def fp8_fits(spec: JobSpec) -> Iterator[Problem]:
    """The rule, as in `rules.py`. Widths of custom models are checked by the engine."""
    if spec.train.fp8 == "off":
        return
    if spec.train.precision != "bf16":
        problem = (
            f"train.fp8 needs precision bf16, from which it converts matrices to 8 bits, not {spec.train.precision}"
        )
        yield Problem("train.precision", problem, "bf16")
    layout, length = spec.layout, spec.model.sequence_length
    rows, factors = UNIT, f"{UNIT}"
    if layout.context > 1:
        rows, factors = rows * layout.context, f"{factors} x parallel.context"
    if spec.model.latent_attention is not None and layout.sequence_parallel_on:  # short vectors of a rank's own tokens
        rows, factors = rows * layout.tensor, f"{factors} x parallel.tensor"
    if length % rows:
        factors = factors if rows == UNIT else f"{factors} ({rows})"
        problem = f"with train.fp8 sequence_length ({length}) must be a multiple of {factors}, as for all 8-bit matmuls"
        unit = math.lcm(rows, shortest_unit(layout))
        yield Problem("model.sequence_length", problem, str(nearest_multiple(unit, length)))
    if spec.model.is_counted:
        yield from _widths_fit(spec.model, layout.tensor)


def _widths_fit(model: ModelConfig, tensor: int) -> Iterator[Problem]:
    """Checks widths that are split over `tensor` ranks."""
    hidden, heads = model.hidden_size, model.heads
    if heads % tensor or not model.has_head_size:
        return  # the heads are wrong first
    if hidden % UNIT:
        unit = math.lcm(UNIT, heads) if model.head_dim is None else UNIT
        problem = f"with train.fp8 hidden_size ({hidden}) must be a multiple of {UNIT}"
        yield Problem("model.hidden_size", problem, str(nearest_multiple(unit, hidden)))
        return
    if model.latent_attention is not None:
        yield from _latent_widths_fit(model.latent_attention, heads // tensor)
    else:
        yield from _head_widths_fit(model, tensor)
    if dense_widths(model) and model.ffn_size % tensor == 0 and model.ffn_size // tensor % UNIT:
        problem = f"with train.fp8 ffn_hidden_size ({model.ffn_size}) must be a multiple of {UNIT} x parallel.tensor"
        nearest = str(nearest_multiple(UNIT * tensor, model.ffn_size))
        yield Problem("model.ffn_hidden_size", problem, nearest)


def _latent_widths_fit(latent: LatentAttentionConfig, heads: int) -> Iterator[Problem]:
    """Checks the widths of latent attention with `heads` heads on each tensor rank."""
    unit = UNIT // math.gcd(UNIT, heads)
    for key, width, of in (
        ("q_rank", latent.q_rank or UNIT, UNIT),
        ("kv_rank", latent.kv_rank, UNIT),
        ("rope_size", latent.rope_size, UNIT),
        ("nope_size", latent.nope_size, unit),
        ("value_size", latent.value_size, unit),
    ):
        if width % of:
            rule = f"with train.fp8 {key} ({width}) must be a multiple of {of}"
            yield Problem(f"model.latent_attention.{key}", rule, str(nearest_multiple(of, width)))


def _head_widths_fit(model: ModelConfig, tensor: int) -> Iterator[Problem]:
    queries, values = model.heads // tensor, 2 * max(1, model.key_value_heads // tensor)
    unit = UNIT // math.gcd(UNIT, queries, values)
    if model.head_size % unit:
        problem = (
            f"with train.fp8 the total width of the heads of a tensor rank must be a multiple of {UNIT}: "
            f"{queries} heads of queries and {values} of keys and values, {model.head_size} wide each, are not"
        )
        yield Problem("model.head_dim", problem, str(nearest_multiple(unit, model.head_size)))


def cuda_graphs_fit(spec: JobSpec) -> Iterator[Problem]:
    """The rule, as in `rules.py`: the first reason why micro-batches cannot be replayed. A replay repeats kernels and
    addresses, so nothing else may differ between micro-batches, and no communication may lie in one."""
    if not spec.train.cuda_graphs:
        return
    reason = next(_reasons(spec), None)
    rule = _too_few(spec) if reason is None else f"not supported with {reason}"
    if rule is not None:
        yield Problem("train.cuda_graphs", rule, "false")


def _reasons(spec: JobSpec) -> Iterator[str]:
    layout, train = spec.layout, spec.train
    if spec.resources.accelerator == "cpu":
        yield "resources.accelerator cpu: CUDA graphs are for GPUs"
    for axis in ("tensor", "pipeline", "context"):
        size = getattr(layout, axis)
        if size > 1:
            yield f"parallel.{axis} {size}: ranks would communicate within a micro-batch"
    if SCHEDULES[layout.schedule] is not ONE_FORWARD_ONE_BACKWARD:
        yield f"parallel.schedule {layout.schedule}: a micro-batch's backward must follow its forward, as with 1f1b"
    if layout.zero >= 2:
        yield f"parallel.zero {layout.zero}: ranks would communicate within a micro-batch"
    if layout.offload_layers:
        yield "parallel.offload_layers: copies of activations do not begin and end within a micro-batch"
    if train.fp8 != "off":
        yield f"train.fp8 {train.fp8}: 8-bit weights move to new addresses in each step"
    if spec.data.documents == "apart":
        yield "data.documents apart: where documents end differs between micro-batches"
    if spec.model.moe is not None:
        yield "model.moe: how many tokens an expert gets differs between micro-batches"
    if spec.model.family == "custom":
        yield "custom models: their Python code would not be replayed"


def _too_few(spec: JobSpec) -> str | None:
    """Of the micro-batches of a step the first is not replayed, nor the last where its backward starts sums over
    replicas."""
    sums_overlap = spec.layout.data > 1 and spec.train.deterministic == "layout"
    if spec.micro_batches > (2 if sums_overlap else 1):
        return None
    which = "the first and the last one of a step are" if sums_overlap else "the first one of a step is"
    return (
        f"no micro-batch would be replayed: a replica has {spec.micro_batches} per step, and {which} computed without "
        "a graph; use a smaller train.micro_batch_size"
    )
