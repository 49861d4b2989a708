"""Peak memory of the passes of a step on one rank, simulated in the order of its schedule. Pure Python.

Layers are in `layer_passes.py`; this module adds the first and last parts of the model, messages between stages, and
tensors that deferred weight gradients hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from manta.workers.accounting.activation_bytes import (
    LAYER_INPUT,
    WIDE,
    ExpertRows,
    layers_are_alike,
    offloaded,
    tokens_of,
)
from manta.workers.accounting.flops import stages_on_rank, vocabulary_rows
from manta.workers.accounting.layer_passes import LayerPasses, Sizes
from manta.workers.accounting.rank_passes import (
    NOTHING,
    Kind,
    Pass,
    Tape,
    blocks_of_rank,
    passes_awaiting_messages,
    total_of_passes,
)
from manta.workers.config import JobSpec
from manta.workers.parallel.recompute import is_offloaded
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import chunk_location, layers_of
from manta.workers.spec.parameters import (
    first_trained_layer,
    frozen_names,
    layer_kinds,
    layers_differ,
    needs_gradient,
    output_weight,
)
from manta.workers.spec.sequence_runs import runs_per_rank

LOSS_ROWS, LOSS_ELEMENTS = 256, 2**24
"""Least rows of a block of 16-bit logits, and its elements on a GPU."""
LOSS_TOKEN = 18
"""Bytes the cross-entropy keeps per token: the target's place (8), whether it is here and counts (2), factors (8)."""
LOSS_NUMBERS = 28
"""Bytes per token that are freed after forward: seven fp32 numbers."""


class StepPeak:
    """Peak memory of a job's ranks on GPUs, or with `gpu` false on CPUs. `sums_separately`: whether 16-bit products for
    weights write fp32 matrices that are then added to the sums, as on GPUs before torch 2.13. Only the largest of
    these, that of the output layer, is counted, at the moment when most memory is held."""

    def __init__(
        self, spec: JobSpec, gpu: bool = True, sums_separately: bool = False, rows: Sequence[ExpertRows] | None = None
    ):
        """`rows`: those of the rank's experts, if they are not as planned."""
        self.spec, self.gpu, self.sizes, self.rows = spec, gpu, Sizes.of(spec), rows
        layout = spec.layout
        self.kind, self.stages, self.chunks = layout.schedule, layout.pipeline, layout.virtual_stages
        self.split = SCHEDULES[self.kind].splits_backward
        self.needs_gradient, self.first = needs_gradient(spec), first_trained_layer(spec)
        self.output_trained = output_weight(spec.model) not in frozen_names(spec)
        self.head_tokens = min(spec.train.head_tokens, tokens_of(spec)[0])
        # The first product of a step is written where the sum is.
        several = spec.micro_batches > 1 or 0 < self.head_tokens < tokens_of(spec)[0]
        self._may_sum_separately = sums_separately
        self.sums_separately = sums_separately and several and self.output_trained and self.sizes.width < WIDE
        self._kinds = layer_kinds(spec) if layers_differ(spec) else None
        self._layers: dict[tuple[object, ...], LayerPasses] = {}
        self._of_layers: dict[tuple[Callable[..., Pass], int, bool], Pass] = {}
        self._of_stages: dict[tuple[object, ...], Pass] = {}
        self._layers_are_alike = layers_are_alike(spec) and rows is None
        self._columns = vocabulary_rows(spec)
        scatters = layout.tensor > 1 and not layout.sequence_parallel_on
        self.message = self.sizes.residual // (layout.tensor if scatters else 1)
        """Bytes of a received message, which may be a part that has to be gathered."""

    def with_stages(self, spec: JobSpec) -> StepPeak:
        """Of a job with the same layers, micro-batches and recomputation, whose schedule splits backward if this one's
        does; it continues with what is known of them."""
        other = StepPeak(spec, self.gpu, self._may_sum_separately, self.rows)
        other._layers, other._of_layers, other._of_stages = self._layers, self._of_layers, self._of_stages
        return other

    def of_rank(self, rank: int, micro_batches: int) -> int:
        """Bytes in addition to the state, of pipeline rank `rank` in a step of `micro_batches` micro-batches."""
        return self.walk(rank, micro_batches)[0]

    def walk(self, rank: int, micro_batches: int) -> tuple[int, int]:
        """Bytes in addition to the state, of pipeline rank `rank` in a step of `micro_batches` micro-batches: at their
        peak, and left at the end of the step."""
        indices = stages_on_rank(self.spec, rank)
        comes = passes_awaiting_messages(self.kind, self.stages, self.chunks, rank)
        known: dict[tuple[str, int, bool], Pass] = {}

        def of_kind(kind: Kind) -> Pass:
            key, begun = kind[:3], kind.posted * self.message
            if key not in known:
                arrives = (kind.chunk, kind.kind) in comes
                known[key] = self._pass(indices[kind.chunk], kind.kind, kind.recomputed, arrives)
            return Pass(begun, begun).then(known[key])

        has_backward = [self.needs_gradient[index] for index in indices]
        taken = total_of_passes(blocks_of_rank(self.spec.layout, rank, micro_batches, has_backward), of_kind)
        return self.tables + taken.peak, self.tables + taken.net

    @property
    def tables(self) -> int:
        """Bytes of tables that all layers share: angles of every position and pair of a head's elements in fp64, with
        cosine and sine in the precision of compute, those of a rank's two runs apart; and the mask of sliding windows,
        for fused kernels."""
        model, layout, width = self.spec.model, self.spec.layout, self.sizes.width
        pairs = model.sequence_length * model.rotated_size // 2
        angles = pairs * (8 + 2 * width) if model.parts.rotary else 0
        if runs_per_rank(layout) > 1:  # the rows of this rank's positions
            angles += pairs // layout.context * 2 * width if model.parts.rotary else 0
        windowed = model.sliding_window is not None and any(model.window(layer) for layer in range(model.layers))
        is_masked = windowed and not (self.spec.attention_is_explicit or layout.attends_by_tiles)
        band = width * model.sequence_length**2 if is_masked else 0
        return angles + band

    def _pass(self, index: int, kind: str, recomputed: bool, arrives: bool) -> Pass:
        """A pass of virtual stage `index`, of a micro-batch that is recomputed or not."""
        if kind != "forward" and not self.needs_gradient[index]:
            return NOTHING
        if not self._layers_are_alike:
            return self._computed_pass(index, kind, recomputed, arrives)
        place = index == 0, self._is_last(index), self._next_stage_is_local(index), self._next_stage_is_local(index - 1)
        key = kind, recomputed, arrives, len(self._indices(index)), place, self.sums_separately
        if key not in self._of_stages:
            self._of_stages[key] = self._computed_pass(index, kind, recomputed, arrives)
        return self._of_stages[key]

    def _computed_pass(self, index: int, kind: str, recomputed: bool, arrives: bool) -> Pass:
        tape = Tape()
        if arrives and self.message != self.sizes.residual:
            tape.allocate(self.sizes.residual)  # gathered
            tape.free(self.message)
        if kind == "forward":
            self._forward(tape, index, recomputed)
        elif kind == "backward_weight":
            self._weights(tape, index)
        else:
            self._backward(tape, index, recomputed)
        return tape.total()

    def _indices(self, index: int) -> range:
        return layers_of(self.spec.model.layers, self.spec.layout, index)

    def _is_last(self, index: int) -> bool:
        return index == self.stages * self.chunks - 1

    def _next_stage_is_local(self, index: int) -> bool:
        """Whether the same rank holds the next virtual stage."""
        if index < 0 or self._is_last(index):
            return False
        shape = self.kind, self.stages, self.chunks
        return chunk_location(*shape, index)[0] == chunk_location(*shape, index + 1)[0]

    def _layer(self, layer: int, recomputed: bool) -> tuple[LayerPasses, bool]:
        """The layer, and whether it is recomputed as a whole."""
        layout = self.spec.layout
        policy = layout.recompute if recomputed else "none"
        modules = tuple(layout.recompute_modules) if policy == "selective" else ()
        kind = None if self._kinds is None else self._kinds[layer]
        rows = None if self.rows is None else self.rows[layer]
        alike = self.spec.model.window(layer) is not None, kind, modules, rows
        if alike not in self._layers:
            self._layers[alike] = LayerPasses(self.spec, layer, modules, self.gpu, rows)
        return self._layers[alike], policy == "full" and layer % layout.recompute_every == 0

    def _known(self, what: Callable[..., Pass], layer: LayerPasses, flag: bool = True) -> Pass:
        key = what, id(layer), flag
        if key not in self._of_layers:
            self._of_layers[key] = what(layer, flag) if what is LayerPasses.forward else what(layer)
        return self._of_layers[key]

    def _offloaded(self, index: int, place: int, recomputed: bool) -> int:
        """Bytes of offloaded activations of one layer of a virtual stage."""
        number = self._indices(index).start + place
        if place < 0 or number < self.first:
            return 0
        layer, is_full = self._layer(number, recomputed)
        terms = {LAYER_INPUT: self.sizes.residual} if is_full else layer.terms
        return sum(offloaded(self.spec, index, place, terms))

    def _coming_back(self, index: int) -> list[list[int]]:
        """For each layer of a virtual stage, by its place: the places of the layers whose activations are brought back
        from the host when its backward begins. An offloaded layer brings back the next one below it; the last one is
        brought back with the layer above it."""
        count = len(self._indices(index))
        waiting = [place for place in range(count) if is_offloaded(place, count, self.spec.layout.offload_layers)]
        coming: list[list[int]] = [[] for _ in range(count)]
        for below, place in pairwise(waiting):
            coming[place].append(below)
        if waiting:
            coming[min(waiting[-1] + 1, count - 1)].append(waiting[-1])
        return coming

    def _forward(self, tape: Tape, index: int, recomputed: bool) -> None:
        residual = self.sizes.residual
        if index == 0:
            self._embedding_lookup(tape)
        leaving = 0
        for place, number in enumerate(self._indices(index)):
            layer, is_full = self._layer(number, recomputed)
            trained = number >= self.first
            tape.run(self._known(LayerPasses.forward, layer, trained and not is_full))
            if not trained:
                tape.free(residual)
            if is_offloaded(place, len(self._indices(index)), self.spec.layout.offload_layers):
                tape.free(leaving)  # which is copied until the next layer is offloaded
                leaving = self._offloaded(index, place, recomputed)
        tape.free(leaving)
        if self._is_last(index):
            self._loss(tape)
        elif not self._next_stage_is_local(index):
            tape.free(residual)

    def _backward(self, tape: Tape, index: int, recomputed: bool) -> None:
        residual = self.sizes.residual
        if self._is_last(index):
            self._loss_backward(tape)
        comes_back = self._coming_back(index)
        for place, number in reversed(list(enumerate(self._indices(index)))):
            if number < self.first:
                break
            layer, is_full = self._layer(number, recomputed)
            tape.allocate(*(self._offloaded(index, each, recomputed) for each in comes_back[place]))
            tape.run(self._known(LayerPasses.recomputed_forward if is_full else LayerPasses.backward, layer))
            if number == self._indices(index)[-1] and not self._is_last(index) and not self.split:
                tape.allocate(residual)  # the received gradient is held until the end
        if index == 0 and self.first < 0:
            self._embedding_backward(tape)
        elif not (self._next_stage_is_local(index - 1) and self.needs_gradient[index - 1]):
            tape.free(residual)
        if self.head_tokens if self._is_last(index) else not self.split:
            tape.free(residual)

    def _weights(self, tape: Tape, index: int) -> None:
        """Deferred products for weights, each of which frees what it held."""
        sizes = self.sizes
        if self._is_last(index) and self.output_trained and not self.head_tokens:
            tape.allocate_briefly(sizes.gathered)
            tape.free(sizes.residual + self._logits_of(tokens_of(self.spec)[0]))
        for number in reversed(self._indices(index)):
            if number < self.first:
                break
            for product in self._layer(number, recomputed=False)[0].deferred():
                tape.run(product)
        if index == 0 and self.first < 0:
            tape.allocate_briefly(self._table)
            tape.free(sizes.full)

    def _logits_of(self, tokens: int) -> int:
        return self.sizes.width * tokens * self._columns

    def _loss(self, tape: Tape) -> None:
        """Final norm, logits, cross-entropy: the residual stream is replaced by what is kept of them."""
        sizes, tokens = self.sizes, tokens_of(self.spec)[0]
        self._layer(0, recomputed=False)[0].norm(tape, sizes.residual, self.spec.model.parts.rms_norm)
        if self.head_tokens:
            return
        tape.allocate_briefly(sizes.in_chunks, self._logits_of(tokens))
        tape.allocate(self._logits_of(tokens))
        tape.allocate(LOSS_TOKEN * tokens)
        tape.free(0 if self.output_trained else sizes.residual)
        tape.allocate_briefly(LOSS_NUMBERS * tokens, self._widened(tokens))

    def _widened(self, tokens: int) -> int:
        """Bytes of the fp32 copy of 16-bit logits of `tokens` tokens; compiled kernels convert in registers."""
        if self.sizes.width == WIDE or self.spec.train.compile:
            return 0
        rows = max(LOSS_ROWS, LOSS_ELEMENTS // self._columns) if self.gpu else LOSS_ROWS
        return WIDE * self._columns * min(tokens, rows)

    def _loss_by_parts(self, tape: Tape) -> None:
        """Logits, cross-entropy, gradients of a few tokens at a time: the output layer's input becomes its gradient."""
        sizes, tokens = self.sizes, self.head_tokens
        tape.allocate(sizes.gathered, sizes.full)
        tape.allocate_briefly(self._logits_of(tokens), (LOSS_TOKEN + LOSS_NUMBERS) * tokens, self._widened(tokens))
        tape.allocate_briefly(self._logits_of(tokens), sizes.width * tokens * self.spec.model.hidden_size)
        tape.allocate_briefly(self._logits_of(tokens), self._separate_product)
        if sizes.gathered:
            tape.allocate(sizes.residual)
            tape.free(sizes.full)
        tape.free(sizes.gathered, sizes.residual)
        self._layer(0, recomputed=False)[0].norm_gradient(tape, sizes.residual, self.spec.model.parts.rms_norm)
        tape.free(sizes.residual)  # the norm's input; the incoming tensor of backward is held until its end

    @property
    def _separate_product(self) -> int:
        """Bytes of the gradient of the output layer's weight, before it is added to the sum."""
        return WIDE * self._columns * self.spec.model.hidden_size if self.sums_separately else 0

    def _loss_backward(self, tape: Tape) -> None:
        """From the logits' gradient, which is in the logits' memory, to that of the residual stream."""
        if self.head_tokens:
            self._loss_by_parts(tape)
            return
        sizes, logits = self.sizes, self._logits_of(tokens_of(self.spec)[0])
        gathered = sizes.gathered if self.output_trained and not self.split else 0
        tape.allocate(gathered, sizes.full)
        if sizes.gathered:
            tape.allocate(sizes.residual)
            tape.free(sizes.full)
        if not self.split:
            tape.allocate_briefly(self._separate_product)
        tape.free(gathered)
        if not self.output_trained:
            tape.free(logits)
        elif not self.split:
            tape.free(logits, sizes.residual)
        self._layer(0, recomputed=False)[0].norm_gradient(tape, sizes.residual, self.spec.model.parts.rms_norm)
        tape.free(sizes.residual, sizes.residual, LOSS_TOKEN * tokens_of(self.spec)[0])

    def _embedding_lookup(self, tape: Tape) -> None:
        """Rows of the embedding, summed over the tensor group: the beginning of the residual stream stays."""
        sizes, alone = self.sizes, self.spec.layout.tensor == 1
        if not alone:
            tape.allocate_briefly(sizes.full, sizes.full)
        if not self.spec.model.parts.rotary:
            tape.allocate_briefly(sizes.residual, sizes.residual)
        tape.allocate(sizes.residual)
        if self.spec.model.dropout > 0:
            self._layer(0, recomputed=False)[0].drop_out(tape)
            tape.allocate(sizes.residual // sizes.width)

    def _embedding_backward(self, tape: Tape) -> None:
        """The embedding's gradient from the residual stream's gradient, at once or deferred."""
        sizes = self.sizes
        if self.spec.model.dropout > 0:
            tape.allocate_briefly(sizes.residual)
            tape.free(sizes.residual // sizes.width)
        if self.spec.layout.tensor > 1:
            if sizes.gathered:
                tape.allocate(sizes.full)
                tape.free(sizes.residual)
            tape.allocate_briefly(sizes.full)
        if not self.split:
            tape.allocate_briefly(self._table)
            tape.free(sizes.full)

    @property
    def _table(self) -> int:
        """Bytes of the embedding's gradient in fp32, which a GPU adds to the sum as a whole, and those of its rows."""
        sizes, h = self.sizes, self.spec.model.hidden_size
        rows = sizes.full // sizes.width * WIDE if sizes.width < WIDE else 0
        return rows + (WIDE * self._columns * h if self.gpu else 0)
