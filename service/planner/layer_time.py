"""Seconds of one micro-batch through a layer, the embedding and the output layer, forward and backward. Pure Python.

Shapes: n tokens of the micro-batch, o those that a rank has outside of the tensor-parallel blocks, h hidden, a heads of
the rank, d head size, f inner width of the MLP on the rank, s sequence, v vocabulary of the rank. The bytes of
element-wise kernels count each tensor that is read or written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from manta.service.planner.communication import Groups, gather_seconds, reduce_seconds
from manta.service.planner.context_time import ContextTime, scores_computed
from manta.service.planner.expert_time import ExpertTime
from manta.service.planner.hardware import HOST_COPY
from manta.service.planner.operations import (
    ROW_BYTES,
    WIDE,
    Budget,
    Passes,
    memory_seconds,
    product_rate,
    product_seconds,
)
from manta.service.planner.software import Software
from manta.workers.accounting.activation_bytes import offloaded, saved_terms, tokens_of, width_of
from manta.workers.accounting.flops import recomputed_layer_passes, vocabulary_rows
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import (
    Activation,
    Attention,
    Block,
    Experts,
    Heads,
    Norm,
    Operation,
    Products,
    Tensor,
    Weight,
    layer_table_of,
)
from manta.workers.spec.parameters import TOKEN_EMBEDDING, first_trained_layer

MASK = 1
"""Bytes of an element of a dropout mask."""
KEYS_OF_BLOCK = 512
"""Block of scores that torch's fused attention on a CPU computes as a whole, or skips as a whole."""
CAST_ROWS, CAST_COLUMNS, CAST_BOTH = 5, 5, 6
"""Bytes moved per 16-bit element: read for the scale and again for the cast, and written once or twice."""


def unit_of(*rows: int) -> int:
    """A number of elements that divides all these row lengths, as far as alignment matters."""
    return math.gcd(ROW_BYTES, *rows)


def _adapted(products: Products) -> list[tuple[Weight, int]]:
    """For each adapter, the weight beside which it is, and the columns of its result."""
    return [(weight, rows.length * rows.blocks) for weight in products.weights for rows in weight.adapters]


@dataclass
class LayerTime:
    """Times of the parts of one job's model on one rank of a cluster."""

    spec: JobSpec
    groups: Groups
    software: Software
    frozen: frozenset[str] = frozenset()
    """Names, within a layer, of parameters that are not trained; or that of the output layer's weight."""
    layer: int = 0
    """The layer."""

    def without(self, frozen: frozenset[str], layer: int = 0) -> LayerTime:
        """Times of this model's parts, with layer `layer`, with only the parameters in `frozen` frozen."""
        return replace(self, frozen=frozen, layer=layer)

    def __post_init__(self) -> None:
        spec, model = self.spec, self.spec.model
        self.machine = self.groups.cluster.machine
        self.width, self._vocabulary = width_of(spec), vocabulary_rows(spec)
        self.linear_width = self.width if spec.train.fp8 == "off" else 1
        self.tokens, self.outside = tokens_of(spec)
        self.hidden, self.table = model.hidden_size, layer_table_of(spec, self.layer)
        self.attention, self.has_dropout = self.table.attention, model.dropout > 0
        self.projects_at_once = True
        """Whether queries, keys and values are one product."""
        self.host_operations = (0, 0)
        """What a layer costs the host in addition to its operations, in units of one, forward and backward."""
        self.experts: ExpertTime | None = None
        """The layer's experts, if it has some."""
        if self.table.experts is not None:
            given = self.spec, self.groups, self.software, self.table.experts, self.frozen, self._elements
            self.experts = ExpertTime(*given)
        self.enters_alone = self.experts is not None and not any(
            isinstance(each, Products) for each in self.table.blocks[-1].operations
        )
        """Whether experts gather their input, and sum their results over tensor ranks, without shared experts that do
        it."""

    def layer_passes(self) -> tuple[Budget, Budget, Budget]:
        """Times of the layer: forward, and both halves of backward."""
        forward, backward, weight = self.forward(), self.backward_input(), self.backward_weight()
        forward.copies = self._waiting_for_copies(forward.device_seconds)
        backward.copies = self._waiting_for_copies(backward.device_seconds + weight.device_seconds)
        return forward, backward, weight

    def passes(self) -> Passes:
        """The times of all parts."""
        return Passes(
            *self.layer_passes(),
            self.embedding_forward(),
            self.embedding_backward(),
            self.output_forward(),
            self.output_backward(),
        )

    def _waiting_for_copies(self, seconds: float) -> float:
        """How long a layer that takes `seconds` waits for offloaded activations, as a mean over a stage's layers: the
        copies of each offloaded layer overlap with its share of all layers."""
        layout, model = self.spec.layout, self.spec.model
        fewest = max(1, model.layers // (layout.pipeline * layout.virtual_stages))
        layers = fewest if layout.stage_layers is None else min(layout.stage_layers)
        count = min(layout.offload_layers, layers)
        if count == 0:
            return 0.0
        terms = saved_terms(self.spec, self.layer, layout.recompute)
        rate = HOST_COPY if self.machine.gpu is None else self.machine.gpu.copy
        moved = sum(offloaded(self.spec, 0, 0, terms)) / rate
        return max(0.0, moved * count / layers - seconds)

    # Parts of passes.

    def _matrices(self, products: Products, trained: bool = False) -> list[tuple[int, int]]:
        """Rows and columns of weights with a common input, or with `trained` of those that have gradients."""
        weights = [each for each in products.weights if not trained or f"{each.name}.weight" not in self.frozen]
        if products.projects and self.projects_at_once and weights:
            return [(sum(each.rows for each in weights), weights[0].columns)]
        return [(each.rows, each.columns) for each in weights]

    def _elements_of(self, tensor: Tensor) -> int:
        return tensor.columns * (self.outside if tensor.own else self.tokens)

    def _cast(self, budget: Budget, columns: int, times: int, moved: int) -> None:
        """With 8-bit products: casts, `times` of them, of matrices of all tokens with `columns` columns in total."""
        if self.linear_width < self.width:
            budget.elementwise += memory_seconds(self.machine, moved * self.tokens * columns)
            budget.operations += 3 * times

    def _elements(self, budget: Budget, moved: float) -> None:
        budget.elementwise += memory_seconds(self.machine, moved)
        budget.operations += 1

    @cached_property
    def _boundary(self) -> float:
        """Seconds of one collective of a whole activation over the tensor group: an all-reduce, or with sequence
        parallelism an all-gather or a reduce-scatter."""
        return self._collective(self.tokens * self.hidden * self.width)

    def _collective(self, size: float) -> float:
        tensor, cluster = self.groups.tensor, self.groups.cluster
        if self.spec.layout.sequence_parallel_on:
            return gather_seconds(tensor, cluster, size)
        return reduce_seconds(tensor, cluster, size)

    def _entered(self, products: Products) -> float:
        """Collectives of products at the beginning of a block, as a part of one of the residual stream."""
        return 0.0 if products.whole else products.x.columns / self.hidden

    def _communicate(self, budget: Budget, times: float) -> None:
        """`times` collectives, while nothing else runs."""
        if self.groups.tensor.size > 1:
            budget.tensor += times * self._boundary + self._waits(times) * self.machine.constants.skew_seconds
            budget.operations += math.ceil(times)

    def _waits(self, times: float) -> float:
        """How many of `times` collectives wait for late ranks: a gather that directly follows a scatter does not."""
        return times / 2 if self.spec.layout.sequence_parallel_on else times

    def _communicate_overlapped(self, budget: Budget, times: float, work: float) -> None:
        """`times` collectives that overlap with `work` seconds of products, as far as the engine does that."""
        hidden = self.software.overlaps_tensor
        if not hidden:
            self._communicate(budget, times)
        elif self.groups.tensor.size > 1:
            whole = times * self._boundary
            budget.tensor += whole - hidden * min(whole, work)
            budget.operations += math.ceil(times)

    def _enter(self, budget: Budget, width: int, *products: tuple[int, int], boundary: float = 1.0) -> None:
        """Forward products (n, k) of the input of a tensor-parallel block, which is gathered first if the sequence is
        split; `boundary`: the input's part of the width of the residual stream."""
        if self.spec.layout.sequence_parallel_on:
            self._with_boundary(budget, width, *products, boundary=boundary)
        else:
            self._products(budget, width, *products)

    def _products(self, budget: Budget, width: int, *products: tuple[int, int], own: bool = False) -> None:
        """Products of all tokens, or of a rank's own ones, with n results each, from k inputs."""
        machine, tokens = self.machine, self.outside if own else self.tokens
        budget.products += sum(product_seconds(machine, tokens, n, k, 1, width, unit_of(n, k)) for n, k in products)
        budget.operations += len(products)

    def _with_boundary(self, budget: Budget, width: int, *products: tuple[int, int], boundary: float = 1.0) -> None:
        """Products of all tokens with a common input, and the collective that gathers it or sums their result: one
        after the other, or overlapping chunk by chunk."""
        layout, ranks = self.spec.layout, self.groups.tensor.size
        chunks = layout.forward_chunks if ranks > 1 else 1
        if chunks == 1:
            self._products(budget, width, *products)
            self._communicate(budget, boundary)
            return
        # One block of each rank's part of the sequence, in one kernel.
        blocks = ranks if layout.sequence_parallel_on else 1
        rows = -(-self.tokens // (blocks * chunks))
        product = sum(product_seconds(self.machine, rows, n, k, blocks, width, unit_of(n, k)) for n, k in products)
        collective = self._collective(boundary * self.tokens * self.hidden * self.width / chunks)
        # Every chunk's collective overlaps with a product, except the first gather or the last sum.
        hidden = self.software.overlaps_tensor * (chunks - 1) * min(collective, product)
        budget.products += chunks * product
        budget.tensor += chunks * collective - hidden + self._waits(1) * self.machine.constants.skew_seconds
        budget.operations += chunks * (len(products) + 1)

    # A layer.

    def forward(self) -> Budget:
        """One layer's forward."""
        budget = Budget(operations=self.host_operations[0])
        for block in self.table.blocks:
            for operation in block.operations:
                self._forward(budget, operation, block)
            self._residual(budget, block)
        inputs = [each.x.columns for each in self.table.products]
        self._cast(budget, sum(inputs), len(inputs), CAST_ROWS)
        for products in self.table.products:
            self._adapt(budget, products)
        return budget

    def _adapt(self, budget: Budget, products: Products) -> None:
        """What adapters add to results: products with A and with B, in the precision of compute."""
        self._products(budget, self.width, *products.adapters.values())
        self._drop_adapted(budget, products)
        for weight, columns in _adapted(products):  # a part of a result is added to by a kernel of its own
            self._elements(budget, (1 if columns == weight.rows else 3) * self.width * self.tokens * columns)

    def _adapt_backward(self, budget: Budget, products: Products) -> None:
        """Gradients of the input by way of adapters."""
        self._products(budget, self.width, *(shape[::-1] for shape in products.adapters.values()))
        self._drop_adapted(budget, products)
        for weight, columns in _adapted(products):  # gradients of a part of a result are copied
            copied = 0 if columns == weight.rows else 2 * columns
            self._elements(budget, self.width * self.tokens * (weight.columns + copied))

    def _drop_adapted(self, budget: Budget, products: Products) -> None:
        """Dropout of the input of adapters, or of its gradient."""
        lora = self.spec.train.lora
        if lora is not None and lora.dropout > 0 and products.adapters:
            self._elements(budget, (4 * self.width + 2 * MASK) * self.tokens * products.x.columns)

    def _forward(self, budget: Budget, operation: Operation, block: Block) -> None:
        width = self.width
        match operation:
            case Norm(y=y) if y.own:  # norms of heads are a part of turning and splitting
                self._elements(budget, 2 * width * self._elements_of(y))
            case Products(sums=True):
                self._with_boundary(budget, self.linear_width, *self._matrices(operation))
            case Products(ys=ys):
                if operation.whole:
                    self._products(budget, self.linear_width, *self._matrices(operation), own=True)
                else:
                    boundary = self._entered(operation)
                    self._enter(budget, self.linear_width, *self._matrices(operation), boundary=boundary)
                if operation.projects:  # bias, or turning and splitting
                    self._elements(budget, 2 * width * sum(map(self._elements_of, ys)))
            case Heads(xs=xs, ys=ys):
                self._elements(budget, width * sum(map(self._elements_of, (*xs, *ys))))
                self._communicate(budget, xs[2].columns / self.hidden if self.spec.layout.sequence_parallel_on else 0)
            case Attention():
                self._attend(budget, self._attention_forward)
            case Experts():
                self._compute_experts(budget)
            case Activation(xs=xs, y=y):
                self._elements(budget, ((1 if self.software.fused else 3) + len(xs)) * width * self._elements_of(y))

    def _compute_experts(self, budget: Budget) -> None:
        """Experts' forward."""
        assert self.experts is not None
        self.experts.forward(budget)
        if self.enters_alone:
            self._communicate(budget, 2 if self.spec.layout.sequence_parallel_on else 1)

    def _residual(self, budget: Budget, block: Block) -> None:
        self._elements(budget, self._residual_bytes())

    def _residual_bytes(self) -> float:
        """Bias, dropout and residual behind a block."""
        tensors = 3 if self.software.fused or not self.has_dropout else 7
        return (tensors * self.width + (MASK if self.has_dropout else 0)) * self.outside * self.hidden

    def _attend(self, budget: Budget, compute: Callable[[Budget], None], backward: bool = False) -> None:
        """Core attention, and the communication of its context group."""
        before = budget.attention
        compute(budget)
        if self.groups.context.size > 1:
            context = ContextTime(self.spec, self.groups, self.attention)
            own = context.method == "ring"
            work = self.software.overlaps_tensor * (budget.attention - before) if own else 0.0
            budget.context += context.seconds(work, backward)
            budget.context += context.waits(backward) * self.machine.constants.skew_seconds
            budget.attention += memory_seconds(self.machine, context.merged_bytes)
            budget.operations += context.operations(backward)

    def _attention_forward(self, budget: Budget) -> None:
        if self.spec.attention_is_explicit:
            self._explicit_attention(budget, 1, 2 if self.software.fused else 6)
        else:
            self._fused_attention(budget, 1.0)

    def _attention_backward(self, budget: Budget) -> None:
        if self.spec.attention_is_explicit:
            self._explicit_attention(budget, 3, 3 if self.software.fused else 7)
        else:
            self._fused_attention(budget, 2.5)

    def _explicit_attention(self, budget: Budget, context: int, softmax: int) -> None:
        """Batched products over [s/c, s] scores, one of which computes scores and `context` of which read them; the
        softmax moves `softmax` tensors of scores."""
        machine, model, count = self.machine, self.spec.model, self.spec.train.micro_batch_size * self.attention.heads
        s, d, rows = model.sequence_length, model.head_size, model.sequence_length // self.spec.layout.context
        scores = count * rows * s
        budget.attention += product_seconds(machine, rows, s, d, count, self.width, unit_of(s, d))
        budget.attention += context * product_seconds(machine, rows, d, s, count, self.width, unit_of(s, d))
        budget.attention += memory_seconds(machine, scores * softmax * self.width)
        if self.has_dropout:
            budget.attention += memory_seconds(machine, scores * (2 * self.width + MASK))
        budget.attention += memory_seconds(machine, 2 * self.width * self._elements_of(self.attention.y))
        budget.operations += context + 4

    def _fused_attention(self, budget: Budget, times: float) -> None:
        """Kernels that do not store scores and skip what the causal mask hides (on cores, in whole blocks); with a
        window's mask they compute all scores. A backward has five products where a forward has two (arXiv:2205.14135,
        section 3). They reach about half of the rate of a large product (arXiv:2307.08691, section 4), whose tiles of
        scores never leave a multiprocessor."""
        model, count = self.spec.model, self.spec.train.micro_batch_size * self.attention.heads
        s, d, core = model.sequence_length, model.head_size, self.machine.core
        if core is None:
            block, width, rate = 1, float(d), 0.5 * product_rate(self.machine, self.width)
        else:  # the softmax counts
            block, width, rate = KEYS_OF_BLOCK, d + core.attention_width, core.product_rate(self.width)
            rate *= self.machine.threads
        causal = scores_computed(self.spec, block)
        part = causal + (1 / self.spec.layout.context - causal) * self._windowed
        budget.attention += times * 4.0 * part * s * s * width * count / rate
        moved = 2 * (self.attention.y.columns + self.attention.keys) * self.tokens * self.width
        budget.attention += times * memory_seconds(self.machine, moved)
        budget.operations += 1

    @cached_property
    def _windowed(self) -> float:
        """Part of the layers whose attention has a window; times of a layer are means over all of them."""
        model = self.spec.model
        return sum(model.window(layer) is not None for layer in range(model.layers)) / model.layers

    def backward_input(self) -> Budget:
        """The half of one layer's backward that computes gradients of activations, including recomputation."""
        budget = Budget(operations=self.host_operations[1])
        for block in self.table.blocks:
            self._residual_backward(budget)
            for operation in block.operations:
                self._backward(budget, operation, block)
        products = self.table.products
        count = sum(1 if each.projects else len(each.ys) for each in products)
        self._cast(budget, sum(y.columns for each in products for y in each.ys), count, CAST_BOTH)
        for each in products:
            self._adapt_backward(budget, each)
        self._tensor_backward(budget)
        return budget.plus(self.recomputed(), self._recomputed_part)

    def _residual_backward(self, budget: Budget) -> None:
        """The sum with the gradient of the residual stream."""
        moved = 3 * self.width + MASK if self.has_dropout else self.width
        self._elements(budget, moved * self.outside * self.hidden)

    def _backward(self, budget: Budget, operation: Operation, block: Block) -> None:
        match operation:
            case Norm(y=y) if y.own:  # two kernels, for its input and its weights
                self._elements(budget, (5 + 3) * self.width * self._elements_of(y))
            case Products(whole=own):
                shapes = (each[::-1] for each in self._matrices(operation))
                self._products(budget, self.linear_width, *shapes, own=own)
            case Heads(xs=xs, ys=ys):
                self._elements(budget, self.width * sum(map(self._elements_of, (*xs, *ys))))
            case Attention():
                self._attend(budget, self._attention_backward, backward=True)
            case Experts() if self.experts is not None:
                self.experts.backward(budget)
            case Activation(xs=xs, y=y):
                moved = (3 if self.software.fused else 5) + len(xs)
                self._elements(budget, moved * self.width * self._elements_of(y))

    def _tensor_backward(self, budget: Budget) -> None:
        """Collectives of backward: gradients of the blocks' inputs are reduced; with sequence parallelism those of
        their outputs are gathered first, and the inputs again for the weights' gradients."""
        weights, entering = self.weight_products(), [each for each in self.table.products if not each.sums]
        entered = sum(map(self._entered, entering))
        entered += sum(each.xs[2].columns / self.hidden for each in self.table.operations if isinstance(each, Heads))
        alone = int(self.enters_alone)
        if self.spec.layout.sequence_parallel_on:
            trained = [each for each in entering if each.adapters or self._matrices(each, trained=True)]
            again = sum(map(self._entered, trained))
            self._communicate(budget, len(self.table.products) - len(entering) + alone)
            self._communicate_overlapped(budget, entered + again + 2 * alone, 2 * weights)
        else:
            self._communicate_overlapped(budget, entered + alone, weights)

    def trained_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of a layer's matrices that have gradients."""
        return [shape for each in self.table.products for shape in self._matrices(each, trained=True)]

    def weight_products(self) -> float:
        """Seconds of all products for a layer's weight gradients."""
        machine, seconds = self.machine, 0.0
        for each in self.table.products:
            tokens = self.outside if each.whole else self.tokens
            for width, shapes in (
                (self.linear_width, self._matrices(each, trained=True)),
                (self.width, each.adapters.values()),
            ):
                seconds += sum(product_seconds(machine, m, n, tokens, 1, width, unit_of(m, n)) for m, n in shapes)
        return seconds

    def _adapters_gradients(self, budget: Budget) -> None:
        """What gradients of adapters take besides their own products: dropout and the product with A are repeated."""
        for products in self.table.products:
            shapes = products.adapters
            self._products(budget, self.width, *(shape for name, shape in shapes.items() if name.endswith("lora_a")))
            self._drop_adapted(budget, products)
            budget.operations += len(shapes)
            moved = self.software.accumulation_bytes * sum(rows * columns for rows, columns in shapes.values())
            budget.accumulation += memory_seconds(self.machine, moved)

    def _cast_inputs(self, budget: Budget) -> None:
        """Casts of the inputs of products for trained weights."""
        inputs = [each.x.columns for each in self.table.products if self._matrices(each, trained=True)]
        self._cast(budget, sum(inputs), len(inputs), CAST_COLUMNS)

    def backward_weight(self) -> Budget:
        """The half of backward that computes gradients of weights and accumulates them."""
        matrices = self.trained_matrices()
        budget = Budget(products=self.weight_products(), operations=2 * len(matrices))
        self._cast_inputs(budget)
        for each in self.table.products:
            if each.projects and (trained := self._matrices(each, trained=True)):  # biases
                self._elements(budget, self.width * self.tokens * sum(rows for rows, _ in trained))
        parameters = sum(rows * columns for rows, columns in matrices)
        budget.accumulation = memory_seconds(self.machine, self.software.accumulation_bytes * parameters)
        self._adapters_gradients(budget)
        self._gradients_of_experts(budget)
        return budget

    def _gradients_of_experts(self, budget: Budget) -> None:
        """Gradients of the weights of experts and of the router."""
        if self.experts is not None:
            kernels, elements = self.experts.weights(budget)
            self._accumulate(budget, elements, kernels)

    def _accumulate(self, budget: Budget, parameters: int, products: int, parts: int = 1) -> None:
        """Adding `products` gradients, of so many elements together, to the sums of micro-batches; each is computed in
        `parts` products."""
        moved = parts * self.software.accumulation_bytes * parameters
        budget.accumulation += memory_seconds(self.machine, moved)

    @cached_property
    def _recomputed_part(self) -> float:
        """Part of a step's layers and micro-batches with a backward that recompute something."""
        layout, batch = self.spec.layout, self.spec.train.global_batch_size
        if layout.recompute_every == 1 and layout.recompute_keep == 0:
            return 1.0
        reached = self.spec.model.layers - max(0, first_trained_layer(self.spec))
        return recomputed_layer_passes(self.spec, batch) / max(1, reached * batch)

    def recomputed(self) -> Budget:
        """What a layer's backward recomputes."""
        layout = self.spec.layout
        if layout.recompute == "none":
            return Budget()
        if layout.recompute == "full":
            return as_recomputation(self.forward())
        again = Budget()
        if "core_attention" in layout.recompute_modules and not layout.attends_by_tiles:
            self._attend(again, self._attention_forward)
        for module in ("norm", "mlp_activation"):
            made = [each.x for each in self.table.products if each.x.recomputed_by == module]
            if module in layout.recompute_modules:
                self._elements(again, 2 * self.width * sum(map(self._elements_of, made)))
        return as_recomputation(again)

    # The ends of the model.

    def embedding_forward(self) -> Budget:
        """Looks up rows of the table, sums them over the tensor group, adds positions and applies dropout."""
        budget = Budget()
        self._elements(budget, 6 * self.width * self.outside * self.hidden)
        self._communicate(budget, 1)
        return budget

    def embedding_backward(self) -> Budget:
        """Adds gradients to rows of the table."""
        budget = Budget()
        self._elements(budget, 6 * self.width * self.tokens * self.hidden)
        return budget

    def output_forward(self) -> Budget:
        """Final norm, logits, cross-entropy in fp32; with `train.head_tokens` only the norm."""
        budget = Budget()
        self._elements(budget, 2 * self.width * self.outside * self.hidden)
        return budget if self.spec.train.head_tokens else budget.plus(self._logits_forward())

    def _logits_forward(self) -> Budget:
        budget, product = Budget(), (self._vocabulary, self.hidden)
        if self.spec.train.head_tokens:  # gathered in one piece
            self._products(budget, self.width, product)
            self._communicate(budget, int(self.spec.layout.sequence_parallel_on))
        else:
            self._enter(budget, self.width, product)
        loss = self.software.loss_bytes[0] - WIDE + self.width
        self._elements(budget, loss * self.tokens * self._vocabulary)
        return budget

    def _output_weights(self) -> float:
        """Seconds of the product for the gradient of the output layer's weight; none where it is frozen."""
        if self.frozen & {TOKEN_EMBEDDING, "output.weight"}:
            return 0.0
        rows, columns = self._vocabulary, self.hidden
        return product_seconds(self.machine, rows, columns, self.tokens, 1, self.width, unit_of(rows, columns))

    def output_backward(self) -> Budget:
        """Backward of `output_forward`."""
        budget = Budget()
        loss = self.software.loss_bytes[1] - WIDE + self.width
        self._elements(budget, loss * self.tokens * self._vocabulary)
        self._products(budget, self.width, (self.hidden, self._vocabulary))
        weights = self._output_weights()
        budget.products += weights
        self._communicate_overlapped(budget, 1, weights)
        self._elements(budget, 8 * self.width * self.outside * self.hidden)
        if weights:
            moved = self.software.accumulation_bytes * self._vocabulary * self.hidden
            budget.accumulation = memory_seconds(self.machine, moved)
        if not self.spec.train.head_tokens:
            return budget
        parts = -(-self.tokens // self.spec.train.head_tokens)
        budget.accumulation *= parts  # the weight's gradient is read and written for each
        budget.operations *= parts
        return budget.plus(self._logits_forward())


def as_recomputation(again: Budget) -> Budget:
    """A forward that backward repeats; its communication stays communication."""
    moves = {name: getattr(again, name) for name in ("tensor", "context", "expert", "operations")}
    computes = again.device_seconds - again.tensor - again.context - again.expert - again.stalls
    return Budget(recomputation=computes, **moves)
