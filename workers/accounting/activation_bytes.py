"""Bytes of activations that a rank keeps from a forward pass to its backward, by arithmetic. Pure Python.

`layer_terms` lists what this engine keeps, tensor by tensor, and equals the published estimate (arXiv:2205.05198, table
2) up to the norms' statistics. Parameters are not activations. Recomputed activations exist for one layer at a time and
are added for that time.

Shapes: s sequence, of which each of c context ranks has s/c tokens, b micro-batch, h hidden, a heads, g key-value
heads, d head size, f inner width of the MLP, v vocabulary padded to a multiple of the tensor-parallel size t.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from manta.workers.accounting.flops import stages_on_rank, vocabulary_rows
from manta.workers.accounting.rank_passes import Kind, Pass, blocks_of_rank, passes_of_rank, total_of_passes
from manta.workers.config import JobSpec, MoeConfig
from manta.workers.parallel import recompute as recompute_policy
from manta.workers.parallel.recompute import is_offloaded, recomputed
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.schedule import Action
from manta.workers.schedules.stages import layers_of
from manta.workers.spec.layer_table import Activation, Attention, Block, Experts, Norm, Products, Tensor, layer_table_of
from manta.workers.spec.parameters import (
    first_trained_layer,
    frozen_names,
    is_partly_frozen,
    layer_kinds,
    layers_differ,
    layers_of_kinds,
    needs_gradient,
    output_weight,
    parameter_names,
)

LAYER_INPUT = "attention_norm_input"
"""Name of the tensor with which a layer begins: the residual stream."""
WIDE = 4
"""Bytes of an fp32 element that kernels keep in addition to 16-bit activations: statistics of norms, log-sums of
softmax. (On a CPU, statistics have the activations' precision.)"""


IMBALANCE = 1.25
"""Rows that the busiest expert, and the busiest of several expert-parallel ranks, are planned to get, relative to the
mean."""


class ExpertRows(NamedTuple):
    """Rows that the experts of a rank get from a full micro-batch: of each token one for each of them that it goes
    to."""

    all: int
    largest: int
    """Rows of the expert that gets most."""
    came: int
    """Tokens that came from the expert group; 0 if the tensor group has all experts."""


def planned_rows(spec: JobSpec, imbalance: float = IMBALANCE) -> ExpertRows:
    """Rows of the busiest rank of a job with experts: `imbalance` times the mean, if they are spread over ranks."""
    return rows_of_share(spec, 1.0 if spec.layout.expert_size == 1 else imbalance, imbalance)


def worst_rows(spec: JobSpec) -> ExpertRows:
    """The most that a rank can get: the experts of all tokens of the group are there."""
    moe, size, (tokens, _) = spec.model.moe, spec.layout.exchange_size, tokens_of(spec)
    assert moe is not None
    came, own = size * tokens, moe.experts // spec.layout.expert_size
    return ExpertRows(came * min(moe.per_token, own), came, came if size > 1 else 0)


def rows_of_share(spec: JobSpec, of_rank: float, of_expert: float) -> ExpertRows:
    """Rows of a rank with `of_rank` times as many as the mean rank, of whose experts one has `of_expert` times as many
    as the mean expert."""
    moe, size, (tokens, _) = spec.model.moe, spec.layout.exchange_size, tokens_of(spec)
    assert moe is not None
    part = size / spec.layout.expert_size  # tensor ranks have other experts, and the same tokens
    worst, mean = worst_rows(spec), tokens * moe.per_token * part
    largest = min(worst.came or tokens, math.ceil(of_expert * (tokens * moe.per_token) * size / moe.experts))
    came = worst.came
    if size > 1 and spec.layout.dispatch(moe.per_token) == "all_to_all":
        came = min(came, math.ceil(of_rank * tokens * ranks_per_token(moe, spec.layout.expert_size) * part))
    return ExpertRows(min(worst.all, math.ceil(of_rank * mean)), largest, came)


def ranks_per_token(moe: MoeConfig, size: int) -> float:
    """Mean number of `size` expert-parallel ranks that have an expert of a token, if all choices are as frequent."""
    others = moe.experts - moe.experts // size
    missed = math.comb(others, moe.per_token) / math.comb(moe.experts, moe.per_token)
    return size * (1 - missed)


def layer_terms(
    spec: JobSpec,
    layer: int = 0,
    modules: Collection[str] = (),
    repeats: bool = False,
    rows: ExpertRows | None = None,
) -> dict[str, int]:
    """Bytes of every tensor that a layer saves of one full micro-batch, by name, if `modules` are recomputed.
    `repeats`: core attention takes copies of keys and values, one for each head, and saves these; `rows`: those of the
    rank's experts, if they are not as planned (`planned_rows`)."""
    blocks = layer_table_of(spec, layer).blocks
    terms = (block_terms(spec, layer, block, modules, repeats, rows) for block in blocks)
    return {name: size for each in terms for name, size in each.items()}


def block_terms(
    spec: JobSpec,
    layer: int,
    block: Block,
    modules: Collection[str],
    repeats: bool = False,
    rows: ExpertRows | None = None,
) -> dict[str, int]:
    """The part of `layer_terms` that one block saves."""
    terms: dict[str, int] = {}
    width, tokens = width_of(spec), tokens_of(spec)
    frozen = layer_kinds(spec)[layer].frozen if is_partly_frozen(spec) else frozenset[str]()

    def save(*tensors: Tensor) -> None:
        for each in tensors:
            if each.recomputed_by not in modules:
                saved = each.part_of or each
                terms[saved.name] = width * tokens[saved.own] * saved.columns

    for operation in block.operations:
        match operation:
            case Norm(x=x, groups=groups, statistics=statistics):
                save(x)
                terms |= dict.fromkeys(statistics, WIDE * groups * tokens[x.own])
            case Products() if block.experts is not None:
                save(*(() if operation.x == block.experts.x else (operation.x,)))  # of shared experts
            case Products(x=x, weights=weights):
                if any(each.adapters or f"{each.name}.weight" not in frozen for each in weights):
                    save(x)
            case Attention(queries=queries, keys_values=keys_values, y=y, normed=normed):
                layout = spec.layout
                apart = spec.data.documents == "apart" and not layout.attends_by_tiles
                recompute = "core_attention" in modules and not layout.attends_by_tiles
                is_fused = not spec.attention_is_explicit or layout.attends_by_tiles
                save(queries, *(() if repeats else keys_values))
                if repeats:
                    terms |= dict.fromkeys(("repeated_keys", "repeated_values"), bytes_of(spec, y))
                if is_fused and not (recompute or apart):
                    save(y)  # in any case, which is what the next product saves for its trained weight
                    if layout.exchanges_heads and operation.cut is None:  # which the next product takes in another form
                        terms["context_by_heads"] = bytes_of(spec, y)
                if is_fused and apart and normed:
                    # A copy whose tokens are consecutive, sample after sample; otherwise it replaces the original.
                    terms["values_by_document"] = width * tokens[False] * operation.keys
                elif layout.exchanges_heads and normed:
                    terms["values_by_heads"] = width * tokens[False] * operation.keys
                terms |= attention_terms(spec, operation, recompute)
            case Activation(xs=xs):
                save(*xs)
            case Experts(x=x):
                if reads_input(block, frozen):
                    save(x)
                terms |= expert_terms(spec, operation, planned_rows(spec) if rows is None else rows)
                if operation.shared_gate is not None:
                    terms["shared_gate"] = WIDE * tokens[False]
    if block.dropout:
        terms[block.mask] = tokens[True] * spec.model.hidden_size
    return terms


def attention_terms(spec: JobSpec, attention: Attention, recompute: bool = False) -> dict[str, int]:
    """Bytes of what core attention saves in addition to its inputs and its result."""
    model, width, tokens = spec.model, width_of(spec), tokens_of(spec)[0]
    dropout_keys = spec.train.micro_batch_size * attention.heads * 4
    if spec.layout.exchanges_heads:
        dropout_keys //= spec.layout.context
    if spec.layout.attends_by_tiles:
        terms = {"dropout_keys": dropout_keys} if model.dropout > 0 else {}
        return terms | {"log_sums": WIDE * tokens * attention.heads}
    if not spec.attention_is_explicit:
        if recompute:
            return {}
        terms = {"log_sums": WIDE * tokens * attention.heads}
        if spec.data.documents == "apart":  # each document's result in addition to that of the whole row
            terms["context_by_document"] = bytes_of(spec, attention.y)
        return terms
    terms = {"dropout_keys": dropout_keys} if model.dropout > 0 else {}
    if recompute:
        return terms
    scores = attention.heads * tokens * model.sequence_length
    terms["softmax"] = scores * width
    if model.dropout > 0:
        terms |= {"weights_dropout_mask": scores, "weights": scores * width}
    return terms


def expert_terms(spec: JobSpec, experts: Experts, rows: ExpertRows) -> dict[str, int]:
    """Bytes of what experts that get so many `rows` keep in addition to their input."""
    (tokens, _), width = tokens_of(spec), width_of(spec)
    terms = dict.fromkeys(("expert_gates", "expert_ups"), width * rows.all * experts.inner)
    terms |= {"router_outputs": WIDE * tokens * experts.experts, "expert_choice": 4 * tokens * experts.per_token}
    # The order of rows, in 64 bits; of spread experts also that of what comes, or of what is sent and comes.
    chosen = tokens * experts.per_token
    if not rows.came:
        places = chosen
    elif spec.layout.dispatch(experts.per_token) == "all_gather":
        places = rows.all + spec.layout.exchange_size * chosen
    else:
        places = 2 * rows.all + chosen + rows.came
    return terms | {"expert_order": 8 * places}


def reads_input(block: Block, frozen: frozenset[str]) -> bool:
    """Whether the backward of a block with experts needs their input: whether something that reads it is trained."""
    assert block.experts is not None
    inputs = [weight for gate, up, _ in block.experts.weights for weight in (gate, up)]
    inputs += [weight for products in block.products if not products.sums for weight in products.weights]
    inputs += [weight for weight in (block.experts.router, block.experts.shared_gate) if weight is not None]
    return any(f"{weight.name}.weight" not in frozen for weight in inputs)


def deferred_expert_terms(
    spec: JobSpec, block: Block, frozen: frozenset[str], rows: ExpertRows | None = None
) -> dict[str, int]:
    """Bytes of what the weight gradients of a block with experts hold while they are deferred, by name."""
    experts, width, (tokens, _) = block.experts, width_of(spec), tokens_of(spec)
    assert experts is not None
    rows = planned_rows(spec) if rows is None else rows
    terms = expert_terms(spec, experts, rows) | {"expert_activation": width * rows.all * experts.inner}
    terms["grads_of_rows"] = width * rows.came * experts.x.columns
    terms["grads"] = bytes_of(spec, experts.y._replace(own=not spec.layout.sequence_parallel_on))
    if reads_input(block, frozen):
        terms["input"] = bytes_of(spec, experts.x)
    for products in block.products:
        terms |= {y.name: width * tokens * y.columns for y in products.ys if not products.sums}
        terms |= {products.x.name: width * tokens * products.x.columns} if products.sums else {}
    return terms


def bytes_of(spec: JobSpec, tensor: Tensor) -> int:
    """Bytes of a tensor of a full micro-batch."""
    return width_of(spec) * tokens_of(spec)[tensor.own] * tensor.columns


def chunk_bytes(spec: JobSpec, index: int, recompute: bool, rows: Sequence[ExpertRows] | None = None) -> int:
    """Bytes that virtual stage `index` keeps of one full micro-batch; `recompute`: of one that the layout's policy
    applies to; `rows`: if they are not as planned. The first stage includes the embedding, the last one the logits."""
    model, layout = spec.model, spec.layout
    policy = layout.recompute if recompute else "none"
    count, first = layout.pipeline * layout.virtual_stages, first_trained_layer(spec)
    total, layers = 0, layers_of(model.layers, layout, index)
    kinds = len(layers) if layout.offload_layers else min(layout.recompute_every, len(layers))
    for place in range(kinds):
        for layer, times in _alike(spec, layers[place::kinds], first, rows):
            terms = saved_terms(spec, layer, policy, None if rows is None else rows[layer])
            total += times * (sum(terms.values()) - sum(offloaded(spec, index, place, terms)))
    if index == 0 and first < 0 and model.dropout > 0:
        # The dropout's mask (arXiv:2205.05198, section 4.3). The few bytes per token that tell tensor ranks which rows
        # they looked up are left out.
        total += tokens_of(spec)[1] * model.hidden_size
    if index == count - 1:
        total += output_bytes(spec)
    return total


def _alike(spec: JobSpec, layers: range, first: int, rows: Sequence[ExpertRows] | None) -> Iterable[tuple[int, int]]:
    """For each kind of the `layers`, one layer and their number; those before `first` have no backward and are left
    out. Given `rows` differ from layer to layer."""
    if rows is not None:
        return [(layer, 1) for layer in layers if layer >= first]
    if not layers_differ(spec):
        return [(layers[0], len(layers))]
    return layers_of_kinds(spec, (layer for layer in layers if layer >= first))


def saved_terms(spec: JobSpec, layer: int, policy: str, rows: ExpertRows | None = None) -> dict[str, int]:
    """The part of `layer_terms` that a layer keeps of a micro-batch that is recomputed by `policy`."""
    if policy == "full" and layer % spec.layout.recompute_every == 0:
        return {LAYER_INPUT: tokens_of(spec)[True] * spec.model.hidden_size * width_of(spec)}
    return layer_terms(spec, layer, spec.layout.recompute_modules if policy == "selective" else (), rows=rows)


def offloaded(spec: JobSpec, index: int, place: int, terms: dict[str, int]) -> list[int]:
    """Bytes of those `terms` of a layer that are offloaded to host memory; the layer is at `place` in virtual stage
    `index`. A message from another stage stays on the device, and so does the input that the first trained layer takes
    from frozen ones, which is kept for its gradient."""
    layout = spec.layout
    layers = layers_of(spec.model.layers, layout, index)
    if not layout.offload_layers or not is_offloaded(place, len(layers), layout.offload_layers):
        return []
    begins = layers[place] == first_trained_layer(spec)
    stays = LAYER_INPUT if begins or (place == 0 and index > 0) else ""
    return [size for name, size in terms.items() if name != stays and size >= recompute_policy.OFFLOADED_BYTES]


def host_bytes_of_rank(spec: JobSpec, rank: int, micro_batches: int) -> int:
    """Most bytes of host memory that a pipeline rank's activations take at once: a block of pinned memory has the size
    of the next power of two."""
    layout = spec.layout
    if not layout.offload_layers:
        return 0
    shape = layout.schedule, rank, layout.pipeline, layout.virtual_stages, micro_batches
    actions, indices = passes_of_rank(*shape), stages_on_rank(spec, rank)
    again, first = recomputed(actions, layout), first_trained_layer(spec)

    def of_pass(action: Action) -> int:
        index = indices[action.chunk]
        policy = layout.recompute if (action.micro_batch, action.chunk) in again else "none"
        layers = enumerate(layers_of(spec.model.layers, layout, index))
        return sum(
            1 << (size - 1).bit_length()
            for place, layer in layers
            if layer >= first
            for size in offloaded(spec, index, place, saved_terms(spec, layer, policy))
        )

    signs = {"forward": 1, "backward": -1, "backward_input": -1}
    return max(accumulate(signs[action.kind] * of_pass(action) for action in actions if action.kind in signs))


def output_bytes(spec: JobSpec) -> int:
    """Inputs of the final norm and of the output layer, and the logits, unless these are computed a few tokens at a
    time. The cross-entropy also keeps a few numbers per token, which are left out. The paper has 4 s b v / t for the
    logits, which it keeps in fp32 (section 4.3); here they have the activations' precision."""
    (tokens, outside), frozen, model = tokens_of(spec), frozen_names(spec), spec.model
    vector = outside * model.hidden_size * width_of(spec)
    reached = first_trained_layer(spec) < model.layers
    inputs = 0
    if reached or not {name for name in parameter_names(model) if name.startswith("final_norm.")} <= frozen:
        inputs += vector + outside * (1 if model.parts.rms_norm else 2) * WIDE
    if spec.train.head_tokens:  # logits are made in backward
        return inputs + vector
    if output_weight(model) not in frozen:
        inputs += vector
    return inputs + tokens * vocabulary_rows(spec) * width_of(spec)


def bytes_of_rank(spec: JobSpec, rank: int, micro_batches: int, rows: Sequence[ExpertRows] | None = None) -> int:
    """Most bytes of activations of one pipeline rank, in a step of `micro_batches` micro-batches. `rows`: if they are
    not as planned."""
    stages, splits = stages_on_rank(spec, rank), SCHEDULES[spec.layout.schedule].splits_backward
    deferred = [deferred_bytes(spec, index, rows) if splits else 0 for index in stages]
    sizes: dict[tuple[object, ...], int] = {}
    keys = [_kind_of_stage(spec, index) if rows is None else (index,) for index in stages]

    def change(kind: Kind) -> Pass:
        key = keys[kind.chunk], kind.recomputed
        if key not in sizes:
            sizes[key] = chunk_bytes(spec, stages[kind.chunk], kind.recomputed, rows)
        size, later = sizes[key], deferred[kind.chunk]
        left = {"forward": size, "backward": -size, "backward_input": later - size, "backward_weight": -later}
        return Pass(max(0, left[kind.kind]), left[kind.kind])

    has_backward = needs_gradient(spec)
    return total_of_passes(
        blocks_of_rank(spec.layout, rank, micro_batches, [has_backward[index] for index in stages]), change
    ).peak


def layers_are_alike(spec: JobSpec) -> bool:
    """Whether all layers keep the same, so that virtual stages with equally many differ at the model's ends alone."""
    layout, model = spec.layout, spec.model
    windows = model.sliding_window is not None and model.full_attention_every is not None
    every = layout.recompute == "full" and layout.recompute_every > 1
    return not (layers_differ(spec) or layout.offload_layers or windows or every)


def _kind_of_stage(spec: JobSpec, index: int) -> tuple[int, ...]:
    """A key for virtual stage `index`, equal for virtual stages that keep the same."""
    if not layers_are_alike(spec):
        return (index,)
    count = spec.layout.pipeline * spec.layout.virtual_stages
    return len(layers_of(spec.model.layers, spec.layout, index)), int(index == 0), int(index == count - 1)


def deferred_bytes(spec: JobSpec, index: int, rows: Sequence[ExpertRows] | None = None) -> int:
    """Bytes of one full micro-batch that virtual stage `index` holds between the halves of its backward pass: inputs of
    the products and gradients of their results, and with adapters those of the inputs' products with A. The result of a
    row-parallel product is whole on each tensor rank; frozen weights of layers are counted as if they were trained,
    except beside adapters."""
    model, layout, width = spec.model, spec.layout, width_of(spec)
    h, count = model.hidden_size, layout.pipeline * layout.virtual_stages
    tokens, outside = tokens_of(spec)
    first = first_trained_layer(spec)
    layers = [layer for layer in layers_of(model.layers, layout, index) if layer >= first]
    if rows is None:
        total = sum(times * _deferred_of_layer(spec, layer) for layer, times in layers_of_kinds(spec, layers))
    else:
        total = sum(_deferred_of_layer(spec, layer, rows[layer]) for layer in layers)
    if index == 0 and first < 0:
        total += width * tokens * h
    if index == count - 1 and output_weight(model) not in frozen_names(spec) and not spec.train.head_tokens:
        total += width * (outside * h + tokens * vocabulary_rows(spec))
    return total


def _deferred_of_layer(spec: JobSpec, layer: int, rows: ExpertRows | None = None) -> int:
    """The part of `deferred_bytes` that one layer holds."""
    total, *blocks = 0, *layer_table_of(spec, layer).blocks
    for each in (products for block in blocks if block.experts is None for products in block.products):
        if not may_be_deferred(spec, each):
            continue
        results = each.ys
        if each.sums:  # the gradient of the sum is gathered
            results = (each.ys[0]._replace(own=False), *(each.ys if spec.layout.sequence_parallel_on else ()))
        inner = Tensor("inner_gradients", each.inner_columns)
        xs = () if each.shares_input else (each.x,)
        total += sum(bytes_of(spec, tensor) for tensor in (*xs, *results, inner))
    frozen = layer_kinds(spec)[layer].frozen
    for block in (each for each in blocks if each.experts is not None):
        total += sum(deferred_expert_terms(spec, block, frozen, rows).values())
    return total


def may_be_deferred(spec: JobSpec, products: Products) -> bool:
    """Whether products have gradients of weights, which a zero-bubble schedule defers: where adapters alone are trained
    only products beside which there are some, otherwise all."""
    return spec.train.lora is None or products.inner_columns > 0


def tokens_of(spec: JobSpec) -> tuple[int, int]:
    """Tokens of a full micro-batch: all that a context rank has, and those that a rank holds outside of the
    tensor-parallel blocks."""
    tokens = spec.model.sequence_length // spec.layout.context * spec.train.micro_batch_size
    return tokens, tokens // spec.layout.tensor if spec.layout.sequence_parallel_on else tokens


def width_of(spec: JobSpec) -> int:
    """Bytes of an activation element."""
    return 4 if spec.train.precision == "fp32" else 2
