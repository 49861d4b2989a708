"""What this engine's layers do on a calibrated GPU: every element-wise kernel with the bytes that it reads and writes,
as in the modules of `workers/model` and `workers/parallel/tensor`, compiled or eager. Pure Python.

Eager, each operation is a kernel: an RMS norm is eight, six of them on fp32 numbers. torch.compile fuses everything
between two products into one kernel (decision 0029). Shapes are those of `layer_time.py`.
"""

from __future__ import annotations

from manta.service.planner.communication import Groups
from manta.service.planner.context_time import scores_computed
from manta.service.planner.layer_time import LayerTime, as_recomputation
from manta.service.planner.operations import WIDE, Budget, attention_seconds, memory_seconds
from manta.service.planner.software import Software
from manta.workers.accounting.step_peak import LOSS_ELEMENTS, LOSS_ROWS
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
    Rotary,
)

LAYER, COMPILED_LAYER = (35, 45), (45, 60)
"""Host time of a layer in addition to launching its kernels, in units of one kernel launch, forward and backward:
modules, the engine's own functions and autograd are Python, and so are the call of a compiled layer and the operators
within it."""
UNDER_HOOKS = 35
"""Host time of the hooks of a recomputed layer, in units of one kernel launch: each tensor that forward would have kept
goes through Python twice."""
MICRO_BATCH = 30
"""Host time of a micro-batch outside its layers, in addition to launching kernels, in units of one kernel launch."""
SMALL_OF_LOSS = (35, 15)
"""Kernels over one number per token, forward and backward."""
WIDENED, REDUCED, SPREAD = 1.7, 1.4, 1.3
"""Factors on the bytes of torch's kernels that convert 16 bits to fp32, that sum columns or norm rows, and that
broadcast a number over a row: they reach 1.8, 1.9 to 2.4 and 2.3 TB/s on an H100, where others reach 3.0."""
MIXED = 15
"""Bytes that the product of a 16-bit number with an fp32 number of its row counts as, whatever it writes: the kernel
converts element by element, at 5 ps each."""
SORT = 14
"""Kernels that add up the gradients of an embedding's rows: tokens are sorted first."""


def layer_time(spec: JobSpec, groups: Groups, software: Software) -> LayerTime:
    """Times of a model's parts, as exactly as they are known for this machine."""
    exact = software.counts_kernels and groups.cluster.machine.gpu is not None
    return EnginePasses(spec, groups, software) if exact else LayerTime(spec, groups, software)


class EnginePasses(LayerTime):
    """Times of the parts of one job's model, kernel by kernel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gpu = self.machine.gpu
        assert gpu is not None
        self.gpu, self.compiled = gpu, self.spec.train.compile
        self.parts, model = self.spec.model.parts, self.spec.model
        self.projects_at_once, self.grouped = False, model.key_value_heads != model.heads
        self.host_operations = COMPILED_LAYER if self.compiled else LAYER

    # Parts of passes.

    def _elements(self, budget: Budget, moved: float, kernels: int = 1) -> None:
        budget.elementwise += memory_seconds(self.machine, moved) + kernels * self.gpu.kernel_seconds
        budget.operations += kernels

    def _norm(self, budget: Budget, elements: int, rms: bool) -> None:
        """Eager: torch's layer norm, or an RMS norm operation by operation (`rms_norm.py`)."""
        if not rms:
            self._elements(budget, REDUCED * 2 * self.width * elements)
        elif self.width == WIDE:  # squares, their mean, its root's product, the weight's
            self._elements(budget, (8 + 4 + SPREAD * (8 + 8)) * elements, 6)
        else:  # widened before, and rounded before the weight's
            self._elements(budget, (WIDENED * 6 + 8 + 4 + MIXED + 6 + SPREAD * 4) * elements, 8)

    def _norm_backward(self, budget: Budget, elements: int, rms: bool) -> None:
        if not rms:
            self._elements(budget, REDUCED * 5 * self.width * elements, 5)
            return
        # The norm again; the weight's gradient, its sum over rows; the gradient times the weight, the input times its
        # root; what both have along a row, taken from it; all times the root.
        if self.width == WIDE:
            moved = SPREAD * 8 + 12 + REDUCED * 4 + SPREAD * (8 + 8) + 12 + 4 + SPREAD * (12 + 8)
            self._elements(budget, moved * elements, 11)
        else:
            moved = MIXED + 6 + 6 + REDUCED * 2 + SPREAD * 4 + WIDENED * 6 + MIXED
            moved += 12 + 4 + SPREAD * (12 + 8) + 6
            self._elements(budget, moved * elements, 13)

    # A layer.

    def _residual(self, budget: Budget, block: Block) -> None:
        residual = self.outside * self.hidden
        if self.compiled:
            dropped = self._residual_bytes() - 3 * self.width * residual if self.has_dropout else 0.0
            self._elements(budget, 3 * self.width * residual + dropped)
        elif self.has_dropout:
            self._elements(budget, self._residual_bytes(), 8)
        else:  # what the product is added to, or a sum of its own
            self._elements(budget, (2 if block.ends_in_product else 3) * self.width * residual)

    def _forward(self, budget: Budget, operation: Operation, block: Block) -> None:
        match operation:
            case Norm(y=y, rms=rms):
                if not self.compiled:
                    self._norm(budget, self._elements_of(y), rms)
                elif operation is block.operations[0] and block is not self.table.blocks[0]:
                    # Within the kernel of the sum that makes its input.
                    budget.elementwise += memory_seconds(self.machine, self.width * self._elements_of(y))
                else:
                    self._elements(budget, 2 * self.width * self._elements_of(y))
            case Products():
                self._products(budget, self.linear_width, *self._matrices(operation), own=operation.whole)
                gathered = self._entered(operation) if self.spec.layout.sequence_parallel_on else 0
                self._communicate(budget, 1 if operation.sums else gathered)
            case Rotary(turned=tensors):
                for columns, turned in tensors:
                    if self.compiled:
                        self._elements(budget, 2 * self.width * self.tokens * columns)
                    else:  # a copy of one half, two products and two sums of halves
                        self._elements(budget, 6 * self.width * self.tokens * turned, 5)
            case Heads():
                self._make_heads(budget, operation)
            case Attention(cut=cut):
                self._attend(budget, self._attention_forward)
                if cut is not None:
                    self._elements(budget, 2 * self.width * self._elements_of(cut))
            case Experts():
                self._compute_experts(budget)
            case Activation(xs=xs, y=y) if self.compiled:
                self._elements(budget, (1 + len(xs)) * self.width * self._elements_of(y))
            case Activation():
                self._activate(budget, operation)

    def _make_heads(self, budget: Budget, heads: Heads) -> None:
        """Queries, keys and values of latent attention, and the gather of the keys' rotated part."""
        (q, kv, rotated), (wide, *_), width = heads.xs, heads.ys, self.width * self.tokens
        turned = self.attention.heads * rotated.columns
        if self.spec.layout.sequence_parallel_on:
            self._communicate(budget, rotated.columns / self.hidden)
        if self.compiled:
            moved = sum(each.columns for each in (*heads.xs, *heads.ys))
            self._elements(budget, width * moved, 3)
            return
        if heads.copies_queries:
            self._elements(budget, width * (q.columns + wide.columns))
        if heads.copies_queries or self.spec.model.score_factor != 1.0:
            self._elements(budget, 2 * width * wide.columns)
        self._elements(budget, 6 * width * (turned + rotated.columns) + 2 * width * rotated.columns, 11)
        zeros = 2 * wide.columns - kv.columns - turned
        self._elements(budget, width * (2 * kv.columns + turned + rotated.columns + zeros), 5)

    def _activate(self, budget: Budget, activation: Activation) -> None:
        gated = len(activation.xs) > 1
        moved = (5 if gated else 2) * self.width * self._elements_of(activation.y)
        self._elements(budget, moved, 2 if gated else 1)

    def _fused_attention(self, budget: Budget, times: float) -> None:
        model, count = self.spec.model, self.spec.train.micro_batch_size * self.attention.heads
        shape = self.machine, count, model.sequence_length, model.head_size, self.width
        for part, masked in ((1 - self._windowed, False), (self._windowed, True)):
            seconds = attention_seconds(*shape, masked)
            computed = 1 / self.spec.layout.context if masked else 2 * scores_computed(self.spec)
            budget.attention += computed * part * (seconds[0] if times == 1.0 else seconds[1])
        budget.operations += 1 if times == 1.0 else 3

    def _residual_backward(self, budget: Budget) -> None:
        residual = self.outside * self.hidden
        if self.compiled:  # with the norm that follows in backward
            return
        self._elements(budget, 3 * self.width * residual)
        if self.has_dropout:
            self._elements(budget, (3 * self.width + 1) * residual, 8)

    def _backward(self, budget: Budget, operation: Operation, block: Block) -> None:
        match operation:
            case Norm(y=y, rms=rms):
                if not self.compiled:
                    self._norm_backward(budget, self._elements_of(y), rms)
                else:  # with the sums around it, and in a kernel of its own its weights' gradients
                    moved = (5 + 2) * self.width * self._elements_of(y)
                    self._elements(budget, moved, 4 if y.own else 3)
            case Products(whole=own):
                shapes = (each[::-1] for each in self._matrices(operation))
                self._products(budget, self.linear_width, *shapes, own=own)
                self._bring_together(budget, operation, block)
            case Heads(xs=(q, kv, rotated), copies_queries=copies):
                width, turned = self.width * self.tokens, self.attention.heads * rotated.columns
                if self.compiled:
                    self._elements(budget, width * (2 * (q.columns + kv.columns) + turned), 3)
                    return
                self._elements(budget, width * (2 * q.columns + 6 * turned), 7)
                if copies or self.spec.model.score_factor != 1.0:
                    self._elements(budget, 2 * width * q.columns)
                self._elements(budget, width * (turned + 7 * rotated.columns + 2 * kv.columns), 8)
            case Rotary(turned=tensors) if not self.compiled:
                for columns, turned in tensors:
                    self._elements(budget, self.width * self.tokens * (2 * columns + 6 * turned), 7)
            case Attention(y=y, keys=keys, cut=cut):
                self._attend(budget, self._attention_backward, backward=True)
                if cut is not None:  # in zeros
                    self._elements(budget, self.width * (self._elements_of(y) + 2 * self._elements_of(cut)), 2)
                if self.grouped:  # each head's gradients of keys and values, and their sums over groups
                    moved = self.width * self.tokens * (4 * y.columns + 2 * keys)
                    budget.attention += memory_seconds(self.machine, moved) + 2 * self.gpu.kernel_seconds
            case Experts() if self.experts is not None:
                self.experts.backward(budget)
            case Activation(xs=xs, y=y):
                elements, gated = self._elements_of(y), len(xs) > 1
                if self.compiled:
                    self._elements(budget, (1 + 2 * len(xs)) * self.width * elements)
                else:
                    self._elements(budget, (11 if gated else 3) * self.width * elements, 4 if gated else 1)

    def _bring_together(self, budget: Budget, products: Products, block: Block) -> None:
        """Gradients of the parts of a product's result become one; those of an input of several products are added."""
        columns = [y.columns for y in products.ys]
        if self.compiled:
            budget.elementwise += memory_seconds(
                self.machine, (len(columns) - 1) * self.width * self.outside * self.hidden
            )
        if not products.projects:
            return
        if not self.compiled:
            self._elements(budget, 2 * self.width * self.tokens * columns[-1])
            return
        turns = any(isinstance(each, Rotary) for each in block.operations)
        moved = 3 if turns and not self.attention.normed else 2
        for each in columns if turns else columns[-1:]:
            self._elements(budget, moved * self.width * self.tokens * each, 2)

    def backward_weight(self) -> Budget:
        """The half that makes gradients of weights, and adds them up."""
        matrices = self.trained_matrices()
        products = len(matrices)
        budget = Budget(products=self.weight_products(), operations=2 * products)
        self._cast_inputs(budget)
        if self.spec.model.bias and matrices:
            columns = sum(rows for rows, _ in matrices)
            self._elements(budget, REDUCED * self.width * self.tokens * columns, 2 * products)
        parameters = sum(rows * columns for rows, columns in matrices)
        self._accumulate(budget, parameters, products)
        self._adapters_gradients(budget)
        self._gradients_of_experts(budget)
        return budget

    def _accumulate(self, budget: Budget, parameters: int, products: int, parts: int = 1) -> None:
        """Products of 16 bits write fp32 matrices that are then added to the sums; others add to the sums directly. In
        a step's first micro-batch they overwrite the sums. `parts`: the number of products that compute each
        gradient."""
        apart = self.width < WIDE and not self.gpu.adds_wider
        later = parts - 1 / self.spec.micro_batches
        budget.accumulation += later * memory_seconds(self.machine, (12 if apart else 4) * parameters)
        budget.accumulation += later * products * self.gpu.kernel_seconds if apart else 0.0

    def recomputed(self) -> Budget:
        """What a layer's backward recomputes."""
        layout = self.spec.layout
        if layout.recompute == "none":
            return Budget()
        if layout.recompute == "full":
            return super().recomputed().plus(Budget(operations=UNDER_HOOKS))
        again = Budget()
        if "core_attention" in layout.recompute_modules and not layout.attends_by_tiles:
            self._attend(again, self._attention_forward)
        for each in self.table.operations:
            match each:
                case Norm(y=y, rms=rms) if y.recomputed_by in layout.recompute_modules:
                    self._norm(again, self._elements_of(y), rms)
                case Activation(y=y) if y.recomputed_by in layout.recompute_modules:
                    self._activate(again, each)
        return as_recomputation(again)

    # The ends of the model.

    def embedding_forward(self) -> Budget:
        """Looks up rows of the table, sums them over the tensor group, adds positions and applies dropout."""
        budget, residual = Budget(operations=MICRO_BATCH), self.outside * self.hidden
        self._elements(budget, 2 * self.width * residual, 3)
        if not self.parts.rotary:
            self._elements(budget, 2 * self.width * residual)
        self._communicate(budget, 1)
        return budget

    def embedding_backward(self) -> Budget:
        """Adds gradients to rows of an fp32 table, which is added to the sum."""
        budget, table = Budget(), self._vocabulary * self.hidden
        self._elements(budget, (self.width + 3 * WIDE) * self.tokens * self.hidden + 4 * WIDE * table, SORT)
        if not self.parts.rotary:
            self._elements(budget, self.width * self.tokens * self.hidden, 5)
        return budget

    def output_forward(self) -> Budget:
        """Final norm, logits, cross-entropy in fp32; with `train.head_tokens` only the norm."""
        budget = Budget()
        self._norm(budget, self.outside * self.hidden, self.parts.rms_norm)
        return budget if self.spec.train.head_tokens else budget.plus(self._logits_forward())

    def _logits_forward(self) -> Budget:
        budget, logits = Budget(), self.tokens * self._vocabulary
        if self.spec.layout.sequence_parallel_on:
            self._communicate(budget, 1)
        self._products(budget, self.width, (self._vocabulary, self.hidden))
        if self.width == WIDE:
            self._elements(budget, 4 * WIDE * logits, SMALL_OF_LOSS[0])
        elif self.compiled:  # largest, sums, exponentials
            moved = REDUCED * 2 * self.width + WIDENED * 2 * self.width
            self._elements(budget, moved * logits, SMALL_OF_LOSS[0])
        else:  # the largest; and block by block two rounds of widened, less, exponentials, and sums or rounded
            blocks = -(-self.tokens // max(LOSS_ROWS, LOSS_ELEMENTS // self._vocabulary))
            widened = WIDENED * (self.width + WIDE) + SPREAD * 2 * WIDE + 2 * WIDE
            moved = REDUCED * self.width + 2 * widened + WIDE + (WIDE + self.width)
            self._elements(budget, moved * logits, SMALL_OF_LOSS[0] + 8 * blocks)
        return budget

    def output_backward(self) -> Budget:
        """Backward of `output_forward`."""
        budget, tokens = Budget(), self.spec.train.head_tokens
        parts = -(-self.tokens // tokens) if tokens else 1
        if tokens:  # with `train.head_tokens`: a few tokens at a time, forward and backward
            budget = self._logits_forward()
        scaled = MIXED if self.width < WIDE else SPREAD * 2 * WIDE
        self._elements(budget, scaled * self.tokens * self._vocabulary, SMALL_OF_LOSS[1])
        self._products(budget, self.width, (self.hidden, self._vocabulary))
        weights = self._output_weights()
        budget.products += weights
        self._communicate_overlapped(budget, 1, weights)
        budget.operations *= parts
        self._norm_backward(budget, self.outside * self.hidden, self.parts.rms_norm)
        if weights:
            self._accumulate(budget, self._vocabulary * self.hidden, 1, parts)
        return budget
