"""Memory that attention across context ranks allocates and frees (`workers/parallel/context/`), in the engine's order.
Pure Python.

Shapes: s sequence, c context ranks, each with s/c rows in one or two runs; a heads, g key-value heads, d head size.
"""

from __future__ import annotations

from manta.workers.accounting.activation_bytes import WIDE, attention_terms, bytes_of, width_of
from manta.workers.accounting.rank_passes import Tape
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import Attention, Tensor
from manta.workers.spec.sequence_runs import LARGEST_FUSED_HEAD, MASKED_ROWS, runs_per_rank

POSITIONS = 9
"""Bytes of which scores are hidden, for each: the distance of two positions, and whether it is hidden."""


def exchange(tape: Tape, spec: JobSpec, size: int) -> None:
    """Rows for heads, or back, of `size` bytes (`by_heads.py`): copies that leave, the others' parts, and the result,
    in whose place the input was."""
    tape.allocate_briefly(size, size // spec.layout.context * (spec.layout.context - 1), size)


class TilePasses:
    """Attention of a rank's rows to all tokens, tile by tile. The context rank that takes most is the one with the last
    run."""

    def __init__(self, spec: JobSpec, attention: Attention, gpu: bool):
        layout, model, window = spec.layout, spec.model, attention.window
        self.width, self.runs, self.ring = width_of(spec), runs_per_rank(layout), layout.context_method == "ring"
        self.factor = WIDE // self.width
        self.terms = attention_terms(spec, attention)
        self.result, self.log_sums = bytes_of(spec, attention.y), self.terms["log_sums"]
        self.own = bytes_of(spec, Tensor("keys_values", 2 * attention.keys))
        """Keys and values of this rank."""
        self.here = self.own * (1 if self.ring else layout.context)
        """Keys and values that are there at a time, besides those that arrive."""
        run = model.sequence_length // (layout.context * self.runs)
        written_out = spec.attention_is_explicit or model.dropout > 0
        if gpu:
            written_out |= (
                window is not None
                or self.width == WIDE
                or model.head_size % 8 > 0
                or model.head_size > LARGEST_FUSED_HEAD
            )
        rows, keys = run, run if self.ring else model.sequence_length - run
        if written_out or window is not None:
            rows = min(run, max(window or 0, MASKED_ROWS))
        if window is not None:
            keys = min(keys, max(window, rows))
        self.part, self.keys = self.result * rows // (run * self.runs), self.own * keys // (run * self.runs)
        """The queries of the largest tile, and its keys and values."""
        heads = spec.train.micro_batch_size * attention.heads
        self.scores = WIDE * heads * rows * keys if written_out else 0
        """Scores of the largest tile in fp32, where they are written out."""
        self.mask = heads * rows * keys if model.dropout > 0 else 0
        self.hidden = POSITIONS * rows * min(rows, keys) if written_out else 0
        """Which scores on the diagonal are hidden."""
        self.follows = self.runs > 1 or rows < run
        """Whether a tile comes before the largest one, whose results are still there."""
        self.is_grouped = attention.heads != attention.key_value_heads
        self.moves_on = self.ring and layout.context > 2
        """Whether keys and values arrive while those of another rank are here."""

    def forward(self, tape: Tape) -> None:
        """The result stays, and what backward needs of it."""
        before, wide, narrow = tape.now, self.result * self.factor, self.factor > 1
        tape.allocate(wide, self.log_sums)
        self._bring(tape)
        of_rows, part = 4 * self.log_sums * self.part // self.result, self.part * self.factor
        if self.scores:
            earlier = part if self.follows else 0
            tape.allocate_briefly(earlier, self.scores, self.scores // 2 if narrow else self.hidden)
            tape.allocate_briefly(earlier, self.scores, self.mask, part, self.keys if narrow else 0)
        else:
            tape.allocate_briefly((1 + self.follows) * self.part, part if narrow else 0, of_rows)
        tape.free(tape.now - before - wide - self.log_sums)
        tape.allocate_briefly(self.result if narrow else 0, self.own if self.ring else 0)
        tape.free(wide - self.result)
        tape.allocate(sum(self.terms.values()) - self.log_sums)

    def backward(self, tape: Tape) -> None:
        """Gradients of queries, keys and values stay."""
        before, wide, own = tape.now, self.factor, self.own * self.factor
        if self.ring:
            tape.allocate(self.own)
            tape.allocate_briefly(self.own, self.result * wide, own, self._tile)
            tape.allocate(self.own if self.moves_on else 0, self.result * wide)
            tape.allocate(3 * own)  # the own part, and the sum that leaves and the one that arrives
            tape.allocate_briefly(self._tile)
            tape.free(self.own if self.moves_on else 0)
        else:
            self._bring(tape)
            tape.allocate(self.here * wide, self.result * wide)
            tape.allocate_briefly(self._tile)
            tape.allocate_briefly(self.here * wide if self.runs > 1 else 0, own)
        tape.allocate(self.own)
        tape.allocate(0 if wide == 1 else self.result)
        tape.free(tape.now - before - self.own - self.result)

    @property
    def _tile(self) -> int:
        """Bytes that the gradients of the largest tile take, with those of the tile before."""
        earlier = self.part + self.own // self.runs if self.follows else 0
        if not self.scores:
            return self.part + self.keys + earlier
        part = self.part * self.factor
        copies = (part if self.is_grouped else 0) + (2 * part + self.keys * 2 if self.factor > 1 else 0)
        dropped = self.scores + self.mask if self.mask else 0
        return 2 * self.scores + dropped + part + copies + (self.keys + earlier) * self.factor

    def _bring(self, tape: Tape) -> None:
        """Keys and values stay: of all ranks in the order of the sequence, or this rank's and those that arrive."""
        if self.ring:
            tape.allocate(self.own, self.own)
        else:
            tape.allocate_briefly(self.own, self.here)
            tape.allocate_briefly(self.here, self.here if self.runs > 1 else 0)  # put in order
            tape.allocate(self.here)
