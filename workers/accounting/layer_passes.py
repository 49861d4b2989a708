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
    core_attention_terms,
    layer_terms,
    tokens_of,
    unsaved_terms,
    value_heads_of,
    width_of,
)
from manta.workers.accounting.flops import layer_matrices, layers_of_rank
from manta.workers.accounting.rank_passes import Pass, Tape
from manta.workers.config import JobSpec
from manta.workers.schedules import SCHEDULES

MASKED_AT_ONCE, MASKED_AT_ONCE_ON_CPU = 2**24, 2**19
"""Elements of a dropout mask that are hashed at once."""

LEAVING = {"mlp_activation": ("mlp.down.weight",), "context": ("attention.output.weight",)}
ENTERING = {
    "mlp_norm": ("mlp.gate.weight", "mlp.up.weight"),
    "attention_norm": ("attention.qkv.weight", "attention.q.weight", "attention.kv.weight"),
}
"""Weights of the products that take each of these inputs."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors that a rank creates in a layer."""

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
    context: int
    """The output of attention; as large as the queries."""
    keys: int
    """The keys; as large as the values."""
    inner: int
    """The inner width of the MLP; with gates there are two such tensors."""

    @classmethod
    def of(cls, spec: JobSpec) -> Sizes:
        """The sizes for a rank of the job `spec`."""
        model, t, width = spec.model, spec.layout.tensor, width_of(spec)
        tokens, outside = tokens_of(spec)
        full, context = width * tokens * model.hidden_size, width * tokens * model.attention_width // t
        gathered = full if spec.layout.sequence_parallel_on else 0
        rows = max(1, model.sequence_length // t)
        of_chunk = -(-rows // min(rows, spec.layout.forward_chunks))
        return cls(
            width,
            full,
            residual=width * outside * model.hidden_size,
            gathered=gathered,
            in_chunks=gathered * min(rows, 2 * of_chunk) // rows,
            context=context,
            keys=width * tokens * value_heads_of(spec) * model.head_size,
            inner=width * tokens * model.ffn_size // t,
        )


class LayerPasses:
    """Forward and backward of one layer."""

    def __init__(self, spec: JobSpec, layer: int, modules: Collection[str] = (), gpu: bool = True):
        """`modules` are recomputed; on a `gpu`, keys and values of grouped heads may be repeated."""
        self.spec, self.model, self.modules, self.sizes = spec, spec.model, modules, Sizes.of(spec)
        layout, sizes, self.gpu = spec.layout, self.sizes, gpu
        self.split, self.eight = SCHEDULES[layout.schedule].splits_backward, EightBits.of(spec)
        self.gates = 2 if self.model.parts.gated_mlp else 1
        self.grouped = self.model.key_value_heads != self.model.heads
        self.repeated = 0
        if gpu and not spec.attention_is_explicit and sizes.keys != sizes.context:
            masked = self.model.window(layer) is not None
            self.repeated = 2 * sizes.context if masked or sizes.width == WIDE else 0
        dropped = unsaved_terms(spec, layer)
        self.terms = {name: size for name, size in layer_terms(spec, modules).items() if name not in dropped}
        if self.repeated and "core_attention" not in modules:
            # The attention's kernel keeps the repeated keys and values instead of the original ones.
            self.terms["repeated"] = self.repeated
            if self.model.parts.query_key_norm:
                self.terms["normed_queries_keys"] -= sizes.keys
            else:
                self.terms["queries_keys_values"] -= 2 * sizes.keys

    @property
    def saved(self) -> int:
        """Bytes kept from forward to backward, including the layer's input."""
        return sum(self.terms.values())

    def forward(self, keeps: bool = True) -> Pass:
        """Without `keeps`, only the output stays."""
        tape, residual = Tape(), self.sizes.residual
        self._attend(tape)
        # The output of the attention block is the input of the next one.
        of_mlp = sum(size for name, size in self.terms.items() if name.startswith("mlp_"))
        of_attention = self.saved - of_mlp - residual if keeps else 0
        tape.free(tape.now - residual - of_attention)
        self.norm(tape, residual)
        self._enter(tape, self.gates * self.sizes.inner)
        tape.allocate((self.gates + 1) * self.sizes.inner)
        self._leave(tape, self.sizes.inner)
        tape.free(tape.now - residual - (self.saved - residual if keeps else 0))
        return tape.total()

    def _attend(self, tape: Tape) -> None:
        """The attention block up to the sum with the residual; nothing that the block holds is freed before."""
        sizes, context, keys = self.sizes, self.sizes.context, self.sizes.keys
        self.norm(tape, sizes.residual)
        self._enter(tape, context + 2 * keys)
        tape.allocate(context + 2 * keys)
        if self.model.parts.query_key_norm:
            self.norm(tape, context)
            self.norm(tape, keys)
        if self.model.parts.rotary:
            tape.allocate_briefly(context // 2 if self.grouped else context)
        tape.allocate(self.repeated)
        self._core(tape)
        tape.allocate(context)
        self._leave(tape, context)

    def _core(self, tape: Tape) -> None:
        """Core attention: what it allocates in addition to its result stays."""
        terms = core_attention_terms(self.spec, recompute=False)
        if self.spec.attention_is_explicit:
            tape.allocate_briefly(self._scores, self._scores)
            tape.allocate(terms.pop("softmax"))
            tape.allocate_briefly(terms.get("weights_dropout_mask", 0), self._hashed(self._scores))
        tape.allocate(*terms.values())

    def _hashed(self, size: int) -> int:
        """Two blocks of 32-bit numbers for a mask of `size` bytes (`workers/parallel/tensor/dropout.py`)."""
        most = MASKED_AT_ONCE if self.gpu else MASKED_AT_ONCE_ON_CPU
        return 8 * min(size // self.sizes.width, most) if self.model.dropout > 0 else 0

    def _enter(self, tape: Tape, size: int) -> None:
        """The products at the beginning of a block, with results of `size` bytes in total."""
        tape.allocate_briefly(self.sizes.in_chunks, size)
        self.eight.product(tape, self.sizes.full, self.sizes.gathered, size)

    def _leave(self, tape: Tape, size: int) -> None:
        """The product at the end of a block, with an input of `size` bytes, and its sum over ranks, which stays."""
        residual = self.sizes.residual
        self.eight.product(tape, size, self.sizes.full)
        if self.sizes.gathered:
            tape.allocate_briefly(self.sizes.in_chunks, residual)
        tape.allocate(residual)
        self.drop_out(tape)

    def drop_out(self, tape: Tape) -> None:
        """Dropout of the residual stream, and the sum with what it is added to."""
        if self.model.dropout > 0:
            residual = self.sizes.residual
            mask = residual // self.sizes.width
            tape.allocate_briefly(mask, max(self._hashed(residual), 2 * residual))

    @property
    def _scores(self) -> int:
        """Bytes of the scores of every head: all tokens by all tokens."""
        heads = self.spec.train.micro_batch_size * self.model.heads // self.spec.layout.tensor
        return heads * self.model.sequence_length**2 * self.sizes.width

    def norm(self, tape: Tape, size: int) -> None:
        """A norm of `size` bytes of input: its output stays."""
        if self.model.parts.rms_norm:
            wide = size * WIDE // self.sizes.width
            tape.allocate_briefly(wide, wide if wide > size else 0)
            tape.allocate_briefly(size, wide if wide > size else 0)
        tape.allocate(size)

    def norm_gradient(self, tape: Tape, size: int) -> None:
        """The gradient of a norm: that of its input stays."""
        if self.model.parts.rms_norm:  # `_RMSNorm.backward`: the norm again, three products in fp32
            tape.allocate_briefly(size, 3 * (size * WIDE // self.sizes.width))
        tape.allocate(size)

    def backward(self) -> Pass:
        """The whole backward; if products for weights are deferred, only what comes before them."""
        tape, sizes = Tape(), self.sizes
        self._leave_backward(tape, sizes.inner, "mlp_activation")
        if self.gates > 1:
            tape.allocate(sizes.inner)
            tape.allocate_briefly(sizes.inner)
        if not self.split:
            self._free(tape, "mlp_activation")
        self._free(tape, "mlp_inner", "mlp_dropout_mask")
        self._enter_backward(tape, self.gates * [sizes.inner], "mlp_norm")
        self._leave_backward(tape, sizes.context, "context")
        self._attend_backward(tape)
        projected = (sizes.context, 2 * sizes.keys) if self.grouped else (sizes.context + 2 * sizes.keys,)
        self._enter_backward(tape, projected, "attention_norm")
        return tape.total()

    def recomputed_forward(self) -> Pass:
        """Backward of a layer that is recomputed as a whole, without any partial recomputation."""
        return self.forward().then(Pass(0, -self.sizes.residual)).then(self.backward())

    def deferred(self) -> tuple[int, ...]:
        """Bytes that each deferred product for weights holds until it runs, in their order."""
        sizes = self.sizes
        leaving = sizes.gathered + sizes.residual
        return (
            leaving + self._held("mlp_activation", sizes.inner),
            self._held("mlp_norm_output", sizes.residual) + self.gates * sizes.inner,
            leaving + self._held("context", sizes.context),
            self._held("attention_norm_output", sizes.residual) + sizes.context + 2 * sizes.keys,
        )

    def _recompute(self, name: str) -> bool:
        """Whether this input of a product is recomputed by itself."""
        module = "mlp_activation" if name == "mlp_activation" else "norm"
        return name != "context" and module in self.modules

    def _held(self, name: str, size: int) -> int:
        """Bytes of the input of a product, which is not kept for frozen weights."""
        return size if name in self.terms or self._recompute(name) else 0

    def _free(self, tape: Tape, *names: str) -> None:
        """Free tensors that were kept from forward."""
        tape.free(*(self.terms.get(name, 0) for name in names))

    def _leave_backward(self, tape: Tape, size: int, name: str) -> None:
        """Backward of the product at the end of a block, with its input `name`; that input's gradient stays. If it is
        deferred, the gathered gradient and the input are held."""
        recomputed_bytes = size if self._recompute(name) else 0
        tape.allocate(self._dropped_out, self.sizes.gathered, recomputed_bytes)
        columns = self.eight.gradient_of_input(tape, [self.sizes.full], size)
        tape.allocate(size)
        if not self.split:
            self.eight.gradients_of_weights(tape, columns, size, *LEAVING[name])
            tape.free(self._dropped_out, self.sizes.gathered, recomputed_bytes)

    @property
    def _dropped_out(self) -> int:
        """Bytes of the gradient before dropout; without dropout that is the gradient of the residual stream itself."""
        return self.sizes.residual if self.model.dropout > 0 else 0

    def _enter_backward(self, tape: Tape, gradients: Sequence[int], norm: str) -> None:
        """From the gradients at the beginning of a block through its norm to the sum with the residual stream's
        gradient. Deferred products hold these gradients and the norm's output; the product at the end of the block also
        holds the incoming gradient."""
        sizes, output = self.sizes, f"{norm}_output"
        recomputed_bytes = sizes.residual if self._recompute(output) else 0
        if recomputed_bytes:
            self.norm(tape, recomputed_bytes)
        gathered = sizes.gathered if self._held(output, 1) and not self.split else 0
        columns = self.eight.gradient_of_input(tape, gradients, gathered + sizes.full)
        tape.allocate(gathered, sizes.full)
        if sizes.gathered:
            tape.allocate(sizes.residual)
        if not self.split:
            self.eight.gradients_of_weights(tape, columns, sizes.full, *ENTERING[norm])
        if sizes.gathered:
            tape.free(sizes.full)
        tape.free(gathered)
        if not self.split:
            tape.free(*gradients, recomputed_bytes)
            self._free(tape, output)
        self.norm_gradient(tape, sizes.residual)
        tape.free(sizes.residual)
        self._free(tape, f"{norm}_input", f"{norm}_statistics")
        tape.allocate_briefly(sizes.residual)
        if not self.split or self._dropped_out:
            tape.free(sizes.residual)

    def _attend_backward(self, tape: Tape) -> None:
        """From the gradient of attention's output to those of queries, keys and values."""
        context, keys = self.sizes.context, self.sizes.keys
        before = tape.now
        if "core_attention" in self.modules:
            self._core(tape)
            tape.allocate(self.repeated, 0 if self.spec.attention_is_explicit else context)
        recomputed_bytes = tape.now - before
        if self.spec.attention_is_explicit:
            tape.allocate_briefly(context, 2 * keys, 2 * self._scores)
        tape.allocate(context, self.repeated or 2 * keys)
        self._free(tape, *core_attention_terms(self.spec, recompute=False), "repeated", "attention_dropout_mask")
        tape.free(context, recomputed_bytes)
        if self.repeated:
            tape.allocate(2 * keys)
            tape.free(self.repeated)
        if not self.split:
            self._free(tape, "context")
        self._free(tape, "normed_queries_keys", "values_by_document")
        if self.model.parts.query_key_norm:
            for size, of_product in (keys, 2 * keys), (context, self.terms["queries_keys_values"] - 2 * keys):
                self._rotary_backward(tape, size, size)
                self.norm_gradient(tape, size)
                tape.free(size, of_product)
            self._free(tape, "query_key_norm_statistics")
        else:
            self._free(tape, "queries_keys_values")
        # Gradients of the parts of one product's result are concatenated.
        tape.allocate_briefly(2 * keys if self.grouped or self.model.parts.query_key_norm else context + 2 * keys)
        if not self.model.parts.query_key_norm:
            self._rotary_backward(tape, *((context, context) if self.grouped else (context + 2 * keys, context + keys)))

    def _rotary_backward(self, tape: Tape, size: int, turned: int) -> None:
        """Gradients of one projection, of which `turned` bytes went through the rotary embedding."""
        if self.model.parts.rotary:
            tape.allocate_briefly(size, turned // 2)


WEIGHT_BYTES = 2
"""8-bit bytes per element of a weight: it is held in both orientations."""


def weight_bytes(spec: JobSpec, rank: int) -> int:
    """Bytes of the 8-bit weights that pipeline rank `rank` holds, from their first use in a step to the next step."""
    if spec.train.fp8 == "off":
        return 0
    return WEIGHT_BYTES * layers_of_rank(spec, rank) * sum(layer_matrices(spec.model, spec.layout.tensor).values())


@dataclass(frozen=True)
class EightBits:
    """Memory of one job's 8-bit products in addition to their results (`workers/parallel/tensor/fp8.py`); nothing with
    train.fp8 off. A 16-bit matrix is half as large in 8 bits. If casts are not compiled, it is first multiplied by its
    scale in 16 bits."""

    on: bool
    by_row: bool
    compiled: bool
    matrices: dict[str, int]
    """Elements of each weight of a layer on one rank, by its name within the layer."""

    @classmethod
    def of(cls, spec: JobSpec) -> EightBits:
        """Memory of the 8-bit products of the job `spec`."""
        train, matrices = spec.train, layer_matrices(spec.model, spec.layout.tensor)
        return cls(train.fp8 != "off", train.fp8 == "rowwise", train.compile, matrices)

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

    def gradients_of_weights(self, tape: Tape, columns: int, x: int, *names: str) -> None:
        """Products of the kept `columns` with an input of `x` bytes, for the gradients of the weights `names`."""
        if not self.on:
            return
        self._cast(tape, x, columns)
        wide = 2 if self.by_row else 4
        tape.allocate_briefly(columns, x // 2, wide * max(self.matrices.get(name, 0) for name in names))

    def _cast(self, tape: Tape, x: int, *beside: int, both: bool = False) -> None:
        """A cast to rows or to columns, or with `both` to both; with a scale per row one after the other."""
        scaled = 0 if self.compiled else x
        tape.allocate_briefly(scaled, x // 2, x // 2 if both and self.by_row else 0, *beside)
        tape.allocate_briefly(x, *beside)
