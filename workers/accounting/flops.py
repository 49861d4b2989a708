"""Parameters and FLOPs of a model by arithmetic. Pure Python.

Only matrix products count, a multiply-add as 2 FLOPs, and a backward pass costs twice its forward (arXiv:2205.05198,
appendix A). `full` counts attention over all s^2 pairs, as papers do; `causal` over half of them. In layers with a
sliding window w, model FLOPs count the pairs of its band: w (2 s - w), and half of that; the kernels compute all s^2.

Model FLOPs are those that the mathematics needs, hardware FLOPs those that the ranks compute: in addition,
recomputation, copies of key-value heads and the padding of the vocabulary. What a fused attention kernel recomputes
within its own backward (q k^T once more) counts as neither.

Frozen parameters (`train.frozen`, and with `train.lora` all but those of adapters) have no gradients, and the layers
before the first one with a trained parameter have no backward: all figures are reduced accordingly. From that layer on
the gradients of all inputs are computed, and count. An adapter's product of its input with A, which is not kept, is
computed again in backward: hardware FLOPs.

Of a layer's experts the FLOPs of those that a token goes to count, and none of a token is left out: hardware FLOPs are
the same (how evenly tokens are spread is a matter of time). A router's product counts in full.

Recomputing core attention alone costs one product of its forward if it is written out, 2 s^2 h FLOPs per sequence and
layer: of q k^T and the weights times v, backward needs the softmax, but not the result of the other product. Fused
kernels can only run as a whole: 4 s^2 h. The paper's own hardware FLOPs, `hardware_paper`, have 1 + s/(3h) instead of 1
+ s/(6h) (arXiv:2205.05198, appendix A, and all HFU of its table 5), which is 12 s^2 h: recomputation is charged with
three forwards, as if it had a backward of its own. It is kept separately, for comparison with published HFU.

Shapes: s sequence, h hidden, a heads, g key-value heads, d head size, f inner width of the MLP, v vocabulary; t
tensor-parallel size. The attention's width is a d, which need not be h.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from manta.workers.config import JobSpec, LoraConfig, ModelConfig, ParallelConfig
from manta.workers.data.batch_plan import BatchPlan, leaf_share, replica_micro_batches
from manta.workers.parallel.data.tree_sum import buffers, waiting_after_rounds
from manta.workers.parallel.recompute import recomputed
from manta.workers.schedules.action_lists import training_actions
from manta.workers.schedules.stages import layer_counts, layers_of, stages_of_rank
from manta.workers.spec.layer_table import layer_table, layer_table_of
from manta.workers.spec.parameters import (
    LayerKind,
    first_trained_layer,
    frozen_names,
    is_partly_frozen,
    layer_kinds,
    layers_of_kinds,
    output_weight,
    padded_rows,
    parameters_of_ends,
)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step over the whole global batch, on all ranks together."""

    model_full: int
    """Forward and backward, attention counted in full."""
    model_causal: int
    """Forward and backward, half of the attention counted."""
    hardware_full: int
    """What the ranks compute, attention counted in full."""
    hardware_causal: int
    """What the ranks compute, half of the attention counted."""
    hardware_paper: int
    """model_full and the recomputation as arXiv:2205.05198 counts it (see above)."""


def parameter_count(spec: JobSpec) -> int:
    """Parameters of the whole model, frozen ones and adapters included, without padding. For GPT with multi-head
    attention, f = 4 h, biases and tied embeddings: 12 L h^2 (1 + 13/(12h) + (v + s)/(12Lh)) (arXiv:2104.04473, eq. 2)
    and the final norm's 2 h."""
    counts = parameter_counts(spec.model, 1, spec.vocabulary_size, lora=spec.train.lora)
    return counts.before[-1] + counts.both


def trained_parameter_count(spec: JobSpec) -> int:
    """The part of `parameter_count` that is trained."""
    frozen = parameter_counts(spec.model, 1, spec.vocabulary_size, frozen_names(spec))
    return parameter_count(spec) - frozen.before[-1] - frozen.both


def adapters_in_words(spec: JobSpec) -> str:
    """How much of a model with adapters is trained, as a sentence."""
    trained, whole = trained_parameter_count(spec), parameter_count(spec)
    return f"train.lora: {trained:,} of {whole:,} parameters are trained ({trained / whole:.2%})"


class ParameterCounts(NamedTuple):
    """Numbers of parameters on one tensor rank."""

    before: tuple[int, ...]
    """For each layer the sum over the layers before it, and at the end the sum over all layers."""
    first: int
    """What a rank that has the model's beginning has besides layers."""
    last: int
    """What a rank that has the model's end has besides layers."""
    both: int
    """What a rank that has both has besides layers."""
    experts: tuple[int, ...]
    """The part of `before` that are experts' parameters."""

    def minus(self, other: ParameterCounts) -> ParameterCounts:
        """The difference, number by number."""
        before, experts = tuple(map(sub, self.before, other.before)), tuple(map(sub, self.experts, other.experts))
        ends = self.first - other.first, self.last - other.last, self.both - other.both
        return ParameterCounts(before, *ends, experts)

    @property
    def of_experts(self) -> ParameterCounts:
        """Parameters of experts alone."""
        return ParameterCounts(self.experts, 0, 0, 0, self.experts)


@lru_cache(maxsize=64)
def parameter_counts(
    model: ModelConfig,
    tensor: int,
    rows: int,
    names: frozenset[str] | None = None,
    lora: LoraConfig | None = None,
    experts: tuple[int, int] | None = None,
) -> ParameterCounts:
    """Parameters on one of `tensor` ranks, or only those in `names`; `rows`: those of the token embedding there;
    `lora`: adapters that the model has; `experts`: number of ranks that they are spread over, and of tensor ranks that
    share each, by default 1 and all."""

    def count(sizes: dict[str, int], prefix: str = "") -> int:
        return sum(size for name, size in sizes.items() if names is None or prefix + name in names)

    spread = experts or (1, tensor)
    tables = [layer_table(model, tensor, layer, lora, *spread) for layer in range(model.layers)]
    layers = (count(table.parameters, f"layers.{layer}.") for layer, table in enumerate(tables))
    of_experts = (
        count({name: table.parameters[name] for name in table.of_experts}, f"layers.{layer}.")
        for layer, table in enumerate(tables)
    )
    first, last, both = (
        count(parameters_of_ends(model, rows, *ends)) for ends in ((True, False), (False, True), (True, True))
    )
    before = tuple(accumulate(layers, initial=0))
    return ParameterCounts(before, first, last, both, tuple(accumulate(of_experts, initial=0)))


def rank_parameters(spec: JobSpec) -> tuple[int, ...]:
    """Parameters that each tensor rank of each pipeline rank holds, with copies of key-value heads, the second copy
    of a tied embedding and the padding of the vocabulary."""
    return tuple(parameters_of_rank(spec, rank) for rank in range(spec.layout.pipeline))


def trained_parameters(spec: JobSpec) -> tuple[int, ...]:
    """The part of `rank_parameters` that is trained."""
    ranks = enumerate(rank_parameters(spec))
    return tuple(whole - frozen_parameters_of_rank(spec, rank) for rank, whole in ranks)


def stages_on_rank(spec: JobSpec, rank: int) -> tuple[int, ...]:
    """Virtual stages of a pipeline rank, one for each chunk."""
    layout = spec.layout
    return stages_of_rank(layout.schedule, layout.pipeline, layout.virtual_stages, rank)


def layers_of_rank(spec: JobSpec, rank: int) -> int:
    """How many layers pipeline rank `rank` has."""
    counts = layer_counts(spec.model.layers, spec.layout)
    return sum(counts[index] for index in stages_on_rank(spec, rank))


def parameters_of_rank(spec: JobSpec, rank: int, names: frozenset[str] | None = None) -> int:
    """Parameters of pipeline rank `rank`, on one tensor rank, or only those in `names`."""
    return _count_on_rank(spec, rank, _counts(spec, names))


def frozen_parameters_of_rank(spec: JobSpec, rank: int) -> int:
    """Parameters of pipeline rank `rank` that are not trained, on one tensor rank."""
    return parameters_of_rank(spec, rank, frozen_names(spec)) if is_partly_frozen(spec) else 0


def trained_experts_of_rank(spec: JobSpec, rank: int) -> int:
    """Trained parameters of experts on pipeline rank `rank`, on one tensor rank."""
    if spec.model.moe is None:
        return 0
    whole = _count_on_rank(spec, rank, _counts(spec, None).of_experts)
    return whole - _count_on_rank(spec, rank, _counts(spec, frozen_names(spec)).of_experts)


def _counts(spec: JobSpec, names: frozenset[str] | None) -> ParameterCounts:
    """Parameters, or only those in `names`, of the rank that has the first of a layer's experts."""
    layout = spec.layout
    shape = spec.model, layout.tensor, vocabulary_rows(spec), names, spec.train.lora
    return parameter_counts(*shape, (layout.expert_size, layout.expert_split))


def _count_on_rank(spec: JobSpec, rank: int, counts: ParameterCounts) -> int:
    layout, indices = spec.layout, stages_on_rank(spec, rank)
    layers = [layers_of(spec.model.layers, layout, index) for index in indices]
    total = sum(counts.before[each.stop] - counts.before[each.start] for each in layers)
    first, last = 0 in indices, layout.pipeline * layout.virtual_stages - 1 in indices
    return total + (counts.both if first and last else first * counts.first + last * counts.last)


def waiting_gradient_buffers(spec: JobSpec) -> int:
    """With `train.deterministic: elastic`: most buffers, each as large as a rank's gradients, that hold partial sums
    while a replica's micro-batches are added in the tree, in addition to the gradients' own; fp32, 4 bytes per
    element."""
    if spec.train.deterministic == "layout":
        return 0
    most = 0
    for level in BatchPlan(spec.train).levels:
        leaves = -(-level.size // spec.train.micro_batch_size)
        if spec.layout.sharding >= 2:  # of a rank's part alone, which needs no other buffer
            most = max(most, spec.layout.context * waiting_after_rounds(leaves, spec.layout.data) - 1)
            continue
        shares = [leaf_share(leaves, spec.layout, replica) for replica in range(spec.layout.data)]
        most = max([most, *(buffers(leaves, share.start, share.stop) for share in shares)])
    return most


def padded_vocabulary(spec: JobSpec) -> int:
    """Rows of the token embedding over all tensor ranks."""
    return padded_rows(spec.vocabulary_size, spec.layout.tensor)


def vocabulary_rows(spec: JobSpec) -> int:
    """Rows of the token embedding on each tensor rank."""
    return padded_vocabulary(spec) // spec.layout.tensor


def core_attention_forward(model: ModelConfig, window: int | None = None) -> int:
    """FLOPs of q k^T and of the weights times v for one sequence in one layer: 4 s^2 a d (arXiv:2205.05198, app. A), or
    with a window those of its band. With latent attention, 2 s^2 a (width of a query + width of a value)."""
    s, latent = model.sequence_length, model.latent_attention
    pairs = s * s if window is None else window * (2 * s - window)
    return 2 * pairs * (model.heads * (latent.query_size if latent else model.head_size) + model.attention_width)


def computed_attention_forward(model: ModelConfig) -> int:
    """FLOPs of core attention that kernels compute for one sequence in one layer: without regard to windows, and with
    the zeros that latent attention appends."""
    return 4 * model.sequence_length**2 * model.heads * model.head_size


def forward_flops(spec: JobSpec) -> tuple[int, int]:
    """Forward FLOPs of one sequence: (all matrix products but core attention, core attention in full).

    For g = a, a d = h and f = 4 h, three times their sum is 72 B L s h^2 (1 + s/(6h) + v/(12hL)) for B = 1
    (arXiv:2205.05198, eq. 7) with GPT's MLP.
    """
    model = spec.model
    dense = _layers_products(spec, 1, range(model.layers)) + _logits(model, spec.vocabulary_size)
    return dense, sum(core_attention_forward(model, model.window(layer)) for layer in range(model.layers))


def _products(spec: JobSpec, tensor: int, layer: int, trained: bool = False) -> int:
    """Forward FLOPs of one sequence in a layer without core attention, on all of `tensor` ranks, which may compute
    copies of key-value heads; or with `trained` those of weights that are trained."""
    split, length = min(tensor, spec.layout.expert_split), spec.model.sequence_length
    table = layer_table(spec.model, tensor, layer, spec.train.lora, split=split)
    frozen = layer_kinds(spec)[layer].frozen if trained else frozenset[str]()
    whole = {f"{weight.name}.weight" for each in table.products if each.whole for weight in each.weights}
    apart = whole if spec.layout.sequence_parallel_on else ()  # each rank has other tokens
    sizes = ((name, size) for name, size in table.dense_matrices.items() if name not in frozen)
    elements = sum(size * (1 if name in apart else tensor) for name, size in sizes)
    if table.experts is not None:
        of_experts = split * sum(table.parameters[name] for name in table.of_experts - frozen)
        elements += of_experts * table.experts.per_token // table.experts.experts
    return 2 * length * elements


def _layers_products(spec: JobSpec, tensor: int, layers: Iterable[int], trained: bool = False) -> int:
    """Forward FLOPs of one sequence in several layers, as in `_products`."""
    return sum(times * _products(spec, tensor, layer, trained) for layer, times in layers_of_kinds(spec, layers))


def _backward(spec: JobSpec, tensor: int, vocabulary: int) -> int:
    """Backward FLOPs of one sequence without core attention: the gradients of inputs, from the first layer that they
    reach, and of trained weights."""
    model, frozen, reached = spec.model, frozen_names(spec), _reached_layers(spec)
    inputs = _layers_products(spec, tensor, reached) + _logits(model, vocabulary)
    if not frozen:
        return 2 * inputs
    weights = _layers_products(spec, tensor, reached, trained=True)
    return inputs + weights + (0 if output_weight(model) in frozen else _logits(model, vocabulary))


def _inner_products(spec: JobSpec) -> int:
    """FLOPs of one sequence's products of the adapters' inputs with A, on all tensor ranks."""
    elements = sum(
        times * size
        for layer, times in layers_of_kinds(spec, range(spec.model.layers))
        for name, size in layer_table_of(spec, layer).adapters.items()
        if name.endswith("lora_a")
    )
    return 2 * spec.model.sequence_length * spec.layout.tensor * elements


def _reached_layers(spec: JobSpec) -> range:
    """The layers in which there is a backward."""
    return range(max(0, first_trained_layer(spec)), spec.model.layers)


def _logits(model: ModelConfig, vocabulary: int) -> int:
    return 2 * model.sequence_length * model.hidden_size * vocabulary


def step_flops(spec: JobSpec, sequences: int | None = None) -> StepFlops:
    """FLOPs of one step over `sequences` (default: the global batch)."""
    model, layout, t = spec.model, spec.layout, spec.layout.tensor
    batch = spec.train.global_batch_size if sequences is None else sequences
    dense, attention = forward_flops(spec)
    computed = _layers_products(spec, t, range(model.layers)) + _logits(model, padded_vocabulary(spec))
    repeated, reached = _sequences_recomputed(spec, batch), _reached_layers(spec)
    passes, core, wide = sum(repeated), core_attention_forward(model), computed_attention_forward(model)
    computed_attention = (model.layers + 2 * len(reached)) * wide
    attention += 2 * sum(core_attention_forward(model, model.window(layer)) for layer in reached)
    dense += _backward(spec, 1, spec.vocabulary_size)
    computed += _backward(spec, t, padded_vocabulary(spec)) + _inner_products(spec)
    again_dense = again_attention = again_paper = 0
    keeps_scores = not layout.attends_by_tiles
    if layout.recompute == "full":
        again_dense, again_attention = _again(spec, t, repeated), passes * wide
        again_paper = _again(spec, 1, repeated) + passes * core
    elif layout.recompute == "selective" and "core_attention" in layout.recompute_modules and keeps_scores:
        again_attention = passes * (wide // 2 if spec.attention_is_explicit else wide)
        again_paper = passes * 3 * core
    return StepFlops(
        model_full=batch * (dense + attention),
        model_causal=batch * (dense + attention // 2),
        hardware_full=batch * (computed + computed_attention) + again_dense + again_attention,
        hardware_causal=batch * (computed + computed_attention // 2) + again_dense + again_attention // 2,
        hardware_paper=batch * (dense + attention) + again_paper,
    )


def _again(spec: JobSpec, tensor: int, repeated: Sequence[int]) -> int:
    """FLOPs without core attention of layers that so many sequences recompute, each."""
    kinds, known = layer_kinds(spec), dict[LayerKind, int]()
    for layer, kind in enumerate(kinds):
        if kind not in known:
            known[kind] = _products(spec, tensor, layer)
    return sum(times * known[kind] for times, kind in zip(repeated, kinds, strict=True))


def recomputed_layer_passes(spec: JobSpec, sequences: int) -> int:
    """Number of (layer, sequence) pairs of a step over `sequences` of which the layer, or a module, is recomputed."""
    return sum(_sequences_recomputed(spec, sequences))


def _sequences_recomputed(spec: JobSpec, sequences: int) -> tuple[int, ...]:
    """For each layer, of how many of a step's `sequences` it, or a module of it, is recomputed."""
    layout, layers, first = spec.layout, spec.model.layers, _reached_layers(spec).start
    if layout.recompute == "none":
        return (0,) * layers
    taken = [layer >= first and layer % _every(layout) == 0 for layer in range(layers)]
    if not layout.recompute_keep:
        return tuple(sequences * one for one in taken)
    shares = [replica_micro_batches(range(sequences), spec, replica) for replica in range(layout.data)]
    sizes = Counter(tuple(len(part) for part in share) for share in shares if share)
    by_stage = [0] * (layout.pipeline * layout.virtual_stages)
    for size, replicas in sizes.items():
        for index, one in enumerate(_recomputed_by_stage(layout, size)):
            by_stage[index] += replicas * one
    counts = (by_stage[index] for index in range(len(by_stage)) for _ in layers_of(layers, layout, index))
    return tuple(count * one for count, one in zip(counts, taken, strict=True))


def _every(layout: ParallelConfig) -> int:
    return layout.recompute_every if layout.recompute == "full" else 1


@lru_cache(maxsize=1024)
def _recomputed_by_stage(layout: ParallelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """For each virtual stage, how many sequences of one replica it recomputes, of micro-batches of `sizes`, by walking
    through what the pipeline's ranks recompute."""
    kind, stages, virtual_stages = layout.schedule, layout.pipeline, layout.virtual_stages
    counts = [0] * (stages * virtual_stages)
    for rank, actions in enumerate(training_actions(kind, stages, virtual_stages, len(sizes))):
        indices = stages_of_rank(kind, stages, virtual_stages, rank)
        for micro_batch, chunk in recomputed(actions, layout):
            counts[indices[chunk]] += sizes[micro_batch]
    return tuple(counts)
