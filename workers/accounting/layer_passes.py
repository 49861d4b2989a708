"""Memory that a layer's passes, 8-bit products included, allocate and free, tensor by tensor, in the engine's order.
Pure Python.

Layers are connected by the residual stream: a layer's forward leaves its output, which is the next layer's input; its
backward starts with the gradient of its output and replaces it by the gradient of its input. Activations kept in
between are those of `activation_bytes.py`. Shapes as there; sizes are bytes of a full micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manta.workers.accounting.activation_bytes import (
    WIDE,
    ExpertRows,
    attention_terms,
    block_terms,
    bytes_of,
    may_be_deferred,
    tokens_of,
    width_of,
)
from manta.workers.accounting.context_passes import TilePasses, exchange
from manta.workers.accounting.expert_passes import ExpertPasses
from manta.workers.accounting.flops import stages_on_rank
from manta.workers.accounting.rank_passes import Pass, Tape
from manta.workers.config import JobSpec
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import layers_of
from manta.workers.spec.layer_table import (
    Activation,
    Attention,
    Block,
    Experts,
    Heads,
    Norm,
    Operation,
    Products,
    Rotary,
    Tensor,
    Weight,
    layer_table,
    layer_table_of,
)
from manta.workers.spec.parameters import layers_of_kinds

MASKED_AT_ONCE, MASKED_AT_ONCE_ON_CPU = 2**24, 2**19
"""Elements of a dropout mask that are hashed at once."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the residual stream in its several forms."""

    width: int
    """Bytes of an element."""
    full: int
    """The residual stream of all tokens."""
    residual: int
    """This rank's part of the residual stream."""
    gathered: int
    """The copy of the whole residual stream that is gathered for a product; 0 if a rank has all of it anyway."""
    in_chunks: int
    """The part of such a copy, or of a sum before it is scattered, that exists at once in forward: two chunks."""

    @classmethod
    def of(cls, spec: JobSpec) -> Sizes:
        """The sizes for a rank of the job `spec`."""
        model, width = spec.model, width_of(spec)
        tokens, outside = tokens_of(spec)
        full = width * tokens * model.hidden_size
        gathered = full if spec.layout.sequence_parallel_on else 0
        rows = max(1, model.sequence_length // (spec.layout.context * spec.layout.tensor))
        of_chunk = -(-rows // min(rows, spec.layout.forward_chunks))
        in_chunks = gathered * min(rows, 2 * of_chunk) // rows
        return cls(width, full, width * outside * model.hidden_size, gathered, in_chunks)


class LayerPasses:
    """Forward and backward of one layer."""

    def __init__(
        self,
        spec: JobSpec,
        layer: int,
        modules: Collection[str] = (),
        gpu: bool = True,
        rows: ExpertRows | None = None,
    ):
        """`modules` are recomputed; on a `gpu`, keys and values of grouped heads may be repeated; `rows`: those of the
        rank's experts, if they are not as planned."""
        self.spec, self.model, self.modules, self.sizes, self.gpu = spec, spec.model, modules, Sizes.of(spec), gpu
        self.split, self.eight = SCHEDULES[spec.layout.schedule].splits_backward, EightBits(spec)
        self.table = layer_table_of(spec, layer)
        self._blocks, attention = self.table.blocks, self.table.attention
        self.repeated = 0
        """Bytes of keys and values, one for each head, where the attention's kernel takes them instead."""
        tiles, explicit = spec.layout.attends_by_tiles, spec.attention_is_explicit
        if gpu and not (explicit or tiles) and attention.heads != attention.key_value_heads:
            masked = attention.window is not None
            self.repeated = 2 * self._bytes(attention.y) if masked or self.sizes.width == WIDE else 0
        repeats = self.repeated > 0 and "core_attention" not in modules
        self._saved = [block_terms(spec, layer, block, modules, repeats, rows) for block in self._blocks]
        self.terms = {name: size for terms in self._saved for name, size in terms.items()}
        """Bytes of each tensor kept from forward to backward."""
        self._experts = {
            block.name: ExpertPasses(spec, layer, block, "norm" in modules, self._norm_again, rows)
            for block in self._blocks
            if block.experts is not None
        }

    def _norm_again(self, tape: Tape, size: int) -> None:
        self.norm(tape, size, self.model.parts.rms_norm)

    def _operations(self, block: Block) -> tuple[Operation, ...]:
        """A block's operations; what follows experts is a part of these."""
        if block.experts is None:
            return block.operations
        return block.operations[: block.operations.index(block.experts) + 1]

    def _bytes(self, *tensors: Tensor) -> int:
        return sum(bytes_of(self.spec, each) for each in tensors)

    @property
    def saved(self) -> int:
        """Bytes kept from forward to backward, including the layer's input."""
        return sum(self.terms.values())

    def forward(self, keeps: bool = True) -> Pass:
        """Without `keeps`, only the output stays."""
        tape, kept = Tape(), -self.sizes.residual
        for block, terms in zip(self._blocks, self._saved, strict=True):
            for operation in self._operations(block):
                self._forward(tape, operation, block)
            self.drop_out(tape)
            # Nothing that a block holds is freed before its end. Its output is the input of the next one.
            kept += sum(terms.values())
            tape.free(tape.now - self.sizes.residual - (kept if keeps else 0))
        return tape.total()

    def _forward(self, tape: Tape, operation: Operation, block: Block) -> None:
        """One operation, whose result stays."""
        sizes = self.sizes
        match operation:
            case Experts():
                self._experts[block.name].forward(tape)
            case Norm(y=y, rms=rms):
                self.norm(tape, self._bytes(y), rms)
            case Products(x=x, ys=ys, sums=False):
                size, gathered = self._bytes(*ys), self._gathered(operation)
                in_chunks = gathered * sizes.in_chunks // max(1, sizes.gathered)
                tape.allocate_briefly(in_chunks, size)
                self.eight.product(tape, gathered or self._bytes(x), gathered, size)
                tape.allocate(size)
                self._adapt(tape, operation, in_chunks)
            case Products(x=x):
                self.eight.product(tape, self._bytes(x), sizes.full)
                self._adapt(tape, operation, sizes.in_chunks or sizes.residual)
                if sizes.gathered:
                    tape.allocate_briefly(sizes.in_chunks, sizes.residual)
                tape.allocate(sizes.residual)
            case Rotary(turned=((_, turned), *_)):
                tape.allocate_briefly(self._bytes(Tensor("turned", turned)) // 2)
            case Heads(xs=xs, ys=ys):
                tape.allocate(*(self._bytes(y) for y in (ys if operation.copies_queries else ys[1:])))
                # Projections are freed before attention, and a rank's own part of the keys before it is gathered.
                tape.free(*(self._bytes(x) for x in (xs[:2] if operation.copies_queries else xs[1:2])))
            case Attention() if self.spec.layout.attends_by_tiles:
                TilePasses(self.spec, operation, self.gpu).forward(tape)
                tape.allocate(self._cut(operation))
            case Attention(y=y):
                if self.spec.layout.exchanges_heads:
                    exchange(tape, self.spec, self._bytes(y, Tensor("keys_values", 2 * operation.keys)))
                tape.allocate(self.repeated)
                self._core(tape, operation)
                tape.allocate(self._bytes(y))
                if self.spec.layout.exchanges_heads:
                    exchange(tape, self.spec, self._bytes(y))
                    tape.allocate(self._bytes(y))
                tape.allocate(self._cut(operation))
            case Activation(y=y):
                tape.allocate(self._bytes(y))

    def _gathered(self, product: Products) -> int:
        """Bytes of the whole input that is gathered for products at the beginning of a block; 0 if a rank has it."""
        return self._bytes(product.x._replace(own=False)) if self.sizes.gathered and not product.whole else 0

    def _cut(self, attention: Attention) -> int:
        """Bytes of the copy of the part of attention's result that the next product takes, if it is a part."""
        return self._bytes(attention.cut) if attention.cut else 0

    def _core(self, tape: Tape, attention: Attention) -> None:
        """Core attention: what it allocates in addition to its result stays."""
        terms = attention_terms(self.spec, attention)
        if self.spec.attention_is_explicit:
            scores = self._scores(attention)
            tape.allocate_briefly(scores, scores)
            tape.allocate(terms.pop("softmax"))
            tape.allocate_briefly(terms.get("weights_dropout_mask", 0), self._hashed(scores))
        tape.allocate(*terms.values())

    def _hashed(self, size: int) -> int:
        """Two blocks of 32-bit numbers for the mask of `size` bytes (`workers/parallel/tensor/dropout.py`)."""
        return self._hashed_numbers(size) if self.model.dropout > 0 else 0

    def _hashed_numbers(self, size: int) -> int:
        most = MASKED_AT_ONCE if self.gpu else MASKED_AT_ONCE_ON_CPU
        return 8 * min(size // self.sizes.width, most)

    def _adapt(self, tape: Tape, product: Products, beside: int) -> None:
        """What adapters add to results, with `beside` bytes of other tensors allocated meanwhile."""
        if inner := self._inner(product):
            copied = self._bytes(Tensor("added", product.copied_columns))
            tape.allocate_briefly(beside, inner, max(copied, self._dropping(product)))

    def _inner(self, product: Products) -> int:
        """Bytes of the products of an input with A, or of their gradients, of all adapters."""
        return self._bytes(Tensor("inner", product.inner_columns))

    def _dropping(self, product: Products) -> int:
        """Bytes that dropout of the input of adapters takes: the result with its mask, or the mask while it is made."""
        lora = self.spec.train.lora
        if lora is None or not lora.dropout or not product.inner_columns:
            return 0
        x = self._adapted_input(product)
        return x // self.sizes.width + max(x, self._hashed_numbers(x))

    def _adapted_input(self, product: Products) -> int:
        """Bytes of the input of adapters, which is whole."""
        return self._bytes(product.x._replace(own=False))

    def _adapt_backward(self, tape: Tape, product: Products) -> None:
        """Gradients of the input by way of adapters; those of their inner products stay."""
        inner, copied = self._inner(product), self._bytes(Tensor("part", product.copied_columns))
        dropping = self._dropping(product)
        tape.allocate(inner)
        tape.allocate_briefly(self._adapted_input(product) if dropping else 0, max(copied, dropping))

    def _adapters_gradients(self, tape: Tape, product: Products, beside: int = 0) -> None:
        """Gradients of adapters, whose inner gradients are freed."""
        copied, inner = self._bytes(Tensor("part", product.copied_columns)), self._inner(product)
        dropping = self._dropping(product)
        dropped = self._adapted_input(product) if dropping else 0
        tape.allocate_briefly(beside, max(dropping, dropped + copied))
        tape.free(inner)

    def _defers(self, product: Products) -> bool:
        """Whether gradients of weights, or of adapters, are deferred."""
        return self.split and may_be_deferred(self.spec, product)

    def drop_out(self, tape: Tape) -> None:
        """Dropout of the residual stream, and the sum with what it is added to."""
        if self.model.dropout > 0:
            residual = self.sizes.residual
            mask = residual // self.sizes.width
            tape.allocate_briefly(mask, max(self._hashed(residual), 2 * residual))

    def _scores(self, attention: Attention) -> int:
        """Bytes of the scores of every head: the rank's tokens by all tokens."""
        return attention.heads * tokens_of(self.spec)[0] * self.model.sequence_length * self.sizes.width

    def norm(self, tape: Tape, size: int, rms: bool) -> None:
        """A norm of `size` bytes of input: its output stays."""
        if rms:
            wide = size * WIDE // self.sizes.width
            tape.allocate_briefly(wide, wide if wide > size else 0)
            tape.allocate_briefly(size, wide if wide > size else 0)
        tape.allocate(size)

    def norm_gradient(self, tape: Tape, size: int, rms: bool) -> None:
        """The gradient of a norm: that of its input stays, and that of its output too."""
        if rms:  # `_RMSNorm.backward`: the norm again, three products in fp32
            tape.allocate_briefly(size, 3 * (size * WIDE // self.sizes.width))
        tape.allocate(size)

    def backward(self) -> Pass:
        """The whole backward; if products for weights are deferred, only what comes before them."""
        tape = Tape()
        for block in reversed(self._blocks):
            tape.allocate(self._dropped_out)
            for operation in reversed(self._operations(block)):
                self._backward(tape, operation, block)
            # The sum with the gradient of the residual stream. If products are deferred, that at the block's end may
            # hold the incoming gradient.
            tape.allocate_briefly(self.sizes.residual)
            if not self._holds_gradient(block) or self._separate(block):
                tape.free(self.sizes.residual)
        return tape.total()

    def _holds_gradient(self, block: Block) -> bool:
        """Whether what is deferred holds the gradient of a block's result as it came."""
        if block.experts is not None:
            return self.split and not self.sizes.gathered
        return self._defers(block.products[-1])

    @property
    def _dropped_out(self) -> int:
        """Bytes of the gradient before dropout; without dropout that is the gradient of the residual stream itself."""
        return self.sizes.residual if self.model.dropout > 0 else 0

    def _separate(self, block: Block) -> int:
        """Bytes of the gradient of the product at the block's end, unless it is that of the residual stream itself."""
        return self._dropped_out if block.ends_in_product else self.sizes.residual

    def _backward(self, tape: Tape, operation: Operation, block: Block) -> None:
        """From the gradients of an operation's results to those of its inputs, which stay."""
        match operation:
            case Experts():
                norm, saved = block.operations[0], self._saved[self._blocks.index(block)]
                assert isinstance(norm, Norm)  # which frees its input itself
                kept = sum(size for name, size in saved.items() if name not in (norm.x.name, *norm.statistics))
                self._experts[block.name].backward(tape, kept, self._dropped_out, self.split)
            case Norm():
                size = self._bytes(operation.y)
                self.norm_gradient(tape, size, operation.rms)
                tape.free(self._dropped_out if operation is self._operations(block)[-1] else size)
                self._free(tape, operation.x)
                if operation is block.operations[0]:  # others' are freed together, before the product
                    tape.free(*(self.terms[name] for name in operation.statistics))
            case Products(sums=False):
                if operation.projects:
                    self._bring_together(tape, operation, block)
                others = [each for each in block.products if each.x == operation.x and each is not operation]
                self._enter_backward(tape, operation, again=not any(each.shares_input for each in others))
                if others and not operation.shares_input:
                    tape.free(self._bytes(operation.x))  # the sum of both gradients
            case Products():
                self._leave_backward(tape, operation, block)
            case Rotary(turned=((columns, turned), *_)):
                size, half = self._bytes(Tensor("all", columns)), self._bytes(Tensor("turned", turned)) // 2
                tape.allocate_briefly(size, half)
            case Heads(xs=xs, ys=ys):
                tape.allocate(*map(self._bytes, xs))
                tape.free(*map(self._bytes, ys))
            case Attention():
                self._attend_backward(tape, operation, block)
            case Activation(xs=(_, *others), y=y):
                if others:
                    tape.allocate(self._bytes(*others))
                    tape.allocate_briefly(self._bytes(y))
                self._free(tape, *(() if self._defers(block.products[-1]) else (y,)), *operation.xs)
                tape.free(self.terms.get(block.mask, 0))

    def recomputed_forward(self) -> Pass:
        """Backward of a layer that is recomputed as a whole, without any partial recomputation."""
        return self.forward().then(Pass(0, -self.sizes.residual)).then(self.backward())

    def deferred(self) -> tuple[Pass, ...]:
        """The deferred products for weights, in their order, each of which frees what it held."""
        passes: list[Pass] = []
        for block in reversed(self._blocks if self.split else ()):
            if block.experts is not None:
                passes.append(self._experts[block.name].deferred())
            else:
                passes += [self._deferred(each) for each in reversed(block.products) if self._defers(each)]
        return tuple(passes)

    def _deferred(self, product: Products) -> Pass:
        tape, sizes = Tape(), self.sizes
        if product.sums:
            self._adapters_gradients(tape, product)
            tape.free(sizes.gathered + sizes.residual + self._held(product.x))
        else:
            gathered, held = self._gathered(product), 0 if product.shares_input else self._held(product.x)
            tape.allocate_briefly(gathered)
            self._adapters_gradients(tape, product, gathered)
            tape.free(held + self._bytes(*product.ys))
        return tape.total()

    def _recomputed(self, x: Tensor) -> int:
        """Bytes of the input of a product, if it is recomputed by itself."""
        return self._bytes(x) if x.recomputed_by in self.modules else 0

    def _held(self, x: Tensor) -> int:
        """Bytes of the input of a product, which is not kept for frozen weights."""
        return self._bytes(x) if x.name in self.terms else self._recomputed(x)

    def _free(self, tape: Tape, *tensors: Tensor) -> None:
        """Free tensors that were kept from forward."""
        tape.free(*(self._bytes(each) for each in tensors if (each.part_of or each).name in self.terms))

    def _leave_backward(self, tape: Tape, product: Products, block: Block) -> None:
        """Backward of the product at the end of a block; the gradient of its input stays. If it is deferred, the
        gathered gradient and the input are held."""
        size, recomputed_bytes = self._bytes(product.x), self._recomputed(product.x)
        tape.allocate(self.sizes.gathered, recomputed_bytes)
        columns = self.eight.gradient_of_input(tape, [self.sizes.full], size)
        tape.allocate(size)
        self._adapt_backward(tape, product)
        if not self._defers(product):
            self.eight.gradients_of_weights(tape, columns, size, product.weights)
            self._adapters_gradients(tape, product)
            tape.free(self._separate(block), self.sizes.gathered, recomputed_bytes)

    def _bring_together(self, tape: Tape, product: Products, block: Block) -> None:
        """Gradients of the parts of one product's result are concatenated."""
        for norm in block.operations[1:]:
            if isinstance(norm, Norm):
                tape.free(*(self.terms[name] for name in norm.statistics))
        attention = self.table.attention
        parts = Tensor("keys_values", 2 * attention.keys) if attention.normed else product.ys[-1]
        tape.allocate_briefly(self._bytes(parts))

    def _enter_backward(self, tape: Tape, product: Products, again: bool) -> None:
        """Backward of the products at the beginning of a block. Deferred products hold the gradients of their results
        and their input. `again`: a dropped input is computed here; otherwise others that share it have done so."""
        recomputed_bytes, own, gathers = self._recomputed(product.x), self._bytes(product.x), self._gathered(product)
        full = gathers or own
        if recomputed_bytes and again:
            self.norm(tape, recomputed_bytes, self.model.parts.rms_norm)
        gradients = [self._bytes(y) for y in product.ys]
        defers = self._defers(product)
        gathered = gathers if self._held(product.x) and not defers else 0
        columns = self.eight.gradient_of_input(tape, gradients, gathered + full)
        tape.allocate(gathered, full)
        self._adapt_backward(tape, product)
        if gathers:
            tape.allocate(own)
        if not defers:
            self.eight.gradients_of_weights(tape, columns, full, product.weights)
            self._adapters_gradients(tape, product)
        if gathers:
            tape.free(full)
        tape.free(gathered)
        if not defers:
            tape.free(*gradients)
            if not product.shares_input:
                tape.free(recomputed_bytes)
                self._free(tape, product.x)

    def _attend_backward(self, tape: Tape, attention: Attention, block: Block) -> None:
        """From the gradient of attention's output to those of queries, keys and values."""
        context, keys_values = self._bytes(attention.y), self._bytes(Tensor("keys_values", 2 * attention.keys))
        taken = (attention.y,) if attention.cut is None else (attention.cut,)
        copied = () if attention.cut is None else (attention.y,)
        if attention.cut is not None:
            tape.allocate(context)
            tape.free(self._cut(attention))
        if self.spec.layout.attends_by_tiles:
            TilePasses(self.spec, attention, self.gpu).backward(tape)
            tape.free(*(self.terms.get(name, 0) for name in ("log_sums", "dropout_keys")), context)
            self._free(tape, *(() if self.split else taken), *copied, attention.queries, *attention.keys_values)
            tape.free(self.terms.get(block.mask, 0))
            return
        if self.spec.layout.exchanges_heads:
            exchange(tape, self.spec, context)
        before = tape.now
        if "core_attention" in self.modules:
            self._core(tape, attention)
            tape.allocate(self.repeated, 0 if self.spec.attention_is_explicit else context)
        recomputed_bytes = tape.now - before
        if self.spec.attention_is_explicit:
            tape.allocate_briefly(context, keys_values, 2 * self._scores(attention))
        tape.allocate(context, self.repeated or keys_values)
        kept = (*attention_terms(self.spec, attention), "repeated_keys", "repeated_values", block.mask)
        tape.free(*(self.terms.get(name, 0) for name in kept))
        tape.free(context, recomputed_bytes)
        if self.repeated:
            tape.allocate(keys_values)
            tape.free(self.repeated)
        self._free(
            tape,
            *(() if self._defers(block.products[-1]) else taken),
            *copied,
            attention.queries,
            *attention.keys_values,
        )
        tape.free(*(self.terms.get(name, 0) for name in ("values_by_document", "values_by_heads", "context_by_heads")))
        if self.spec.layout.exchanges_heads:
            exchange(tape, self.spec, context + keys_values)


WEIGHT_BYTES = 2
"""8-bit bytes per element of a weight: it is held in both orientations."""


def weight_bytes(spec: JobSpec, rank: int) -> int:
    """Bytes of the 8-bit weights that pipeline rank `rank` holds, from their first use in a step to the next step.
    Those of experts stay in 16 bits."""
    if spec.train.fp8 == "off":
        return 0
    layout, layers = spec.layout, spec.model.layers
    own = (layer for index in stages_on_rank(spec, rank) for layer in layers_of(layers, layout, index))
    return WEIGHT_BYTES * sum(times * in_8_bits(spec, layer) for layer, times in layers_of_kinds(spec, own))


def in_8_bits(spec: JobSpec, layer: int) -> int:
    """Elements of a layer's matrices on one tensor rank that are multiplied in 8 bits with train.fp8."""
    table = layer_table(spec.model, spec.layout.tensor, layer)
    return sum(weight.elements for products in table.products for weight in products.weights)


class EightBits:
    """Memory of one job's 8-bit products in addition to their results (`workers/parallel/tensor/fp8.py`); nothing with
    train.fp8 off. A 16-bit matrix is half as large in 8 bits. If casts are not compiled, it is first multiplied by its
    scale in 16 bits."""

    def __init__(self, spec: JobSpec):
        self.on, self.by_row, self.compiled = spec.train.fp8 != "off", spec.train.fp8 == "rowwise", spec.train.compile

    def product(self, tape: Tape, x: int, *beside: int) -> None:
        """A forward product with an input of `x` bytes, with `beside` bytes of other tensors allocated meanwhile."""
        if self.on:
            self._cast(tape, x)
            tape.allocate_briefly(x // 2, *beside)

    def gradient_of_input(self, tape: Tape, grads: Sequence[int], x: int) -> int:
        """Products with the gradients of layers that share an input of `x` bytes. Returns the bytes of what is kept of
        the gradients for the products with the input."""
        if not self.on:
            return 0
        columns = rows = result = 0
        for grad in grads:
            self._cast(tape, grad, columns, rows, result, both=True)
            columns, rows = columns + grad // 2, grad // 2
            tape.allocate_briefly(columns, rows, x, result)
            result = x
        return columns

    def gradients_of_weights(self, tape: Tape, columns: int, x: int, weights: Sequence[Weight]) -> None:
        """Products of the kept `columns` with an input of `x` bytes, for the gradients of the `weights`."""
        if not self.on:
            return
        self._cast(tape, x, columns)
        wide = 2 if self.by_row else 4
        tape.allocate_briefly(columns, x // 2, wide * max(each.elements for each in weights))

    def _cast(self, tape: Tape, x: int, *beside: int, both: bool = False) -> None:
        """A cast to rows or to columns, or with `both` to both; with a scale per row one after the other."""
        scaled = 0 if self.compiled else x
        tape.allocate_briefly(scaled, x // 2, x // 2 if both and self.by_row else 0, *beside)
        tape.allocate_briefly(x, *beside)
