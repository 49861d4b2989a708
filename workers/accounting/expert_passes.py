"""Memory that a layer's experts allocate and free in its passes, in the engine's order
(`workers/parallel/experts/layer.py`). Pure Python.

Shapes: n tokens of the micro-batch, h hidden, E experts, k experts per token, m rows of the experts that the rank has,
f inner width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

from manta.workers.accounting.activation_bytes import (
    WIDE,
    ExpertRows,
    deferred_expert_terms,
    expert_terms,
    planned_rows,
    reads_input,
    tokens_of,
    width_of,
)
from manta.workers.accounting.rank_passes import Pass, Tape
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import Activation, Block
from manta.workers.spec.parameters import layer_kinds

CHOOSING = 16
"""Bytes of each score that choosing experts takes at its peak: a copy, two comparisons, a running sum in int64, its
comparison."""


class ExpertPasses:
    """Forward and backward of the part of a layer that is in its experts and shared experts."""

    def __init__(
        self,
        spec: JobSpec,
        layer: int,
        block: Block,
        recomputed: bool,
        norm: Callable[[Tape, int], None],
        rows: ExpertRows | None = None,
    ):
        """`recomputed`: whether the norm's output, the input, is; `norm`: how; `rows`: if they are not as planned."""
        assert block.experts is not None
        self.experts, self.width, (self.tokens, outside) = block.experts, width_of(spec), tokens_of(spec)
        self.rows, h = planned_rows(spec) if rows is None else rows, spec.model.hidden_size
        frozen = layer_kinds(spec)[layer].frozen
        self.full, self.own = self.width * self.tokens * h, self.width * outside * h
        self.gathered = self.full if spec.layout.sequence_parallel_on else 0
        """A gathered copy; 0 if a rank has all tokens anyway."""
        self.reads_input, self.norm = reads_input(block, frozen), norm if recomputed else None
        self.scores = WIDE * self.tokens * self.experts.experts
        self.factors = 2 * WIDE * self.rows.all
        self.came = self.width * self.rows.came * h
        """Rows that came from the expert group; 0 if they are the input itself."""
        self.kept = expert_terms(spec, self.experts, self.rows)
        self.deferred_terms = deferred_expert_terms(spec, block, frozen, self.rows)
        shared = next((each.y.columns for each in block.operations if isinstance(each, Activation)), 0)
        self.shared = self.width * self.tokens * shared
        """Bytes of one tensor of the shared experts' inner width; 0 without."""
        self.gated = 0 if self.experts.shared_gate is None else self.shared
        """Bytes of the product of such a tensor with the gate's factor; 0 without a gate."""
        self.inner = self.width * self.rows.all * self.experts.inner
        self.wide = WIDE * self.tokens * h if self.width < WIDE else 0
        """Bytes of a copy of the input, or of its gradient, in fp32."""

    def _of_largest(self, hidden: int, inner: int) -> int:
        """Bytes of so many tensors of one expert's rows, of either width."""
        return self.width * self.rows.largest * (hidden * self.experts.x.columns + inner * self.experts.inner)

    def forward(self, tape: Tape) -> None:
        """What is allocated stays, the result with it."""
        tape.allocate(self.gathered, self.kept["router_outputs"], self.scores)
        tape.allocate_briefly(CHOOSING * self.tokens * self.experts.experts)
        tape.allocate(self.kept["expert_choice"], self.kept["expert_order"], 2 * self.shared, self.factors)
        tape.allocate(self.came, 2 * self.inner, self.came or self.full)
        tape.allocate_briefly(max(self._of_largest(2, 1), self._of_largest(1, 2)))
        tape.free(self.came)
        tape.allocate(self.full if self.came else 0)
        tape.allocate(self.shared)
        tape.allocate_briefly(self.gated, self.full if self.shared else 0)
        tape.allocate(self.own if self.gathered else 0)

    def backward(self, tape: Tape, kept: int, separate: int, split: bool) -> None:
        """From the gradient of the result to that of the input, which stays. `kept`: bytes that forward kept;
        `separate`: those of the result's gradient, if nobody else has it. If products for weights are deferred, only
        what comes before them."""
        before = tape.now
        if self.norm is not None and self.reads_input:
            self.norm(tape, self.own)
        tape.allocate(self.gathered, 0 if split or not self.reads_input else self.gathered, self.scores, self.factors)
        if self.shared:
            tape.allocate(2 * self.shared, self.gated)
            tape.allocate_briefly(self.shared)
        rows = 0 if split or not self.reads_input else self.came
        tape.allocate(self.inner if split else 0, self.came, rows, self.came or self.full)
        wide = 2 * WIDE // self.width
        tape.allocate_briefly(max(self._of_largest(1, 4 + wide), self._of_largest(2, 3)))
        tape.free(rows)
        tape.allocate(self.full if self.came else 0, self.scores)
        tape.allocate_briefly(max(3 * self.scores, self.wide, self.full if self.shared else 0))
        tape.allocate(self.own if self.gathered else 0)
        tape.allocate_briefly(0 if split or not self.reads_input else self.wide)
        left = 0
        if split:
            held = self.deferred_terms["grads"]
            left = sum(self.deferred_terms.values()) - (0 if self.gathered else held - separate)
        tape.free(tape.now - before - self.own - left + kept + separate)

    def deferred(self) -> Pass:
        """The deferred products for weights, which free what they held."""
        tape = Tape()
        tape.allocate_briefly(
            self.gathered if self.reads_input else 0, max(self.wide, self.came + self._of_largest(2, 0))
        )
        tape.free(sum(self.deferred_terms.values()))
        return tape.total()
