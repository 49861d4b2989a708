"""Memory of 8-bit products in addition to their results (`workers/parallel/tensor/fp8_products.py`), in bytes. Pure
Python.

A 16-bit matrix is half as large in 8 bits. If casts are not compiled, it is first multiplied by its scale in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.accounting.flops import layer_matrices, layers_of_rank
from workers.accounting.tape import Tape
from workers.config import JobSpec

WEIGHT_BYTES = 2
"""Of an element of a weight: it is held both ways round."""


def weight_bytes(spec: JobSpec, rank: int) -> int:
    """Of the weights in 8 bits that pipeline rank `rank` holds from their first use in a step to the next step."""
    if spec.train.fp8 == "off":
        return 0
    return WEIGHT_BYTES * layers_of_rank(spec, rank) * sum(layer_matrices(spec.model, spec.layout.tensor).values())


@dataclass(frozen=True)
class EightBits:
    """Of the products of one job. With train.fp8 off there is nothing of all this."""

    on: bool
    by_row: bool
    compiled: bool
    matrices: dict[str, int]
    """Elements of the weights of a layer on one rank, by their names in it."""

    @classmethod
    def of(cls, spec: JobSpec) -> EightBits:
        """Those of this job."""
        train, matrices = spec.train, layer_matrices(spec.model, spec.layout.tensor)
        return cls(train.fp8 != "off", train.fp8 == "rowwise", train.compile, matrices)

    def product(self, tape: Tape, x: int, *beside: int) -> None:
        """Of an input of so many bytes, for a moment `beside` others."""
        if self.on:
            self._cast(tape, x)
            tape.for_a_moment(x // 2, *beside)

    def gradient_of_input(self, tape: Tape, grads: Sequence[int], x: int) -> int:
        """Products with the gradients of layers with one input of `x` bytes. Returns the bytes of what is kept of the
        gradients for those with the input."""
        if not self.on:
            return 0
        columns = rows = result = 0
        for grad in grads:
            self._cast(tape, grad, columns, rows, result, both=True)
            columns, rows = columns + grad // 2, grad // 2
            tape.for_a_moment(columns, rows, x, result)
            result = x
        return columns

    def gradients_of_weights(self, tape: Tape, columns: int, x: int, *names: str) -> None:
        """Products of the `columns` that were kept with an input of `x` bytes, for the weights of these names."""
        if not self.on:
            return
        self._cast(tape, x, columns)
        wide = 2 if self.by_row else 4
        tape.for_a_moment(columns, x // 2, wide * max(self.matrices.get(name, 0) for name in names))

    def _cast(self, tape: Tape, x: int, *beside: int, both: bool = False) -> None:
        """To rows or columns, or to both, of which by rows the second are made after the first."""
        scaled = 0 if self.compiled else x
        tape.for_a_moment(scaled, x // 2, x // 2 if both and self.by_row else 0, *beside)
        tape.for_a_moment(x, *beside)
