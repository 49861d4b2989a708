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
"""8-bit bytes per element of a weight: it is held in both orientations."""


def weight_bytes(spec: JobSpec, rank: int) -> int:
    """Bytes of the 8-bit weights that pipeline rank `rank` holds, from their first use in a step to the next step."""
    if spec.train.fp8 == "off":
        return 0
    return WEIGHT_BYTES * layers_of_rank(spec, rank) * sum(layer_matrices(spec.model, spec.layout.tensor).values())


@dataclass(frozen=True)
class EightBits:
    """Memory of the 8-bit products of one job; nothing with train.fp8 off."""

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
            tape.for_a_moment(x // 2, *beside)

    def gradient_of_input(self, tape: Tape, grads: Sequence[int], x: int) -> int:
        """Products with the gradients of layers that share an input of `x` bytes. Returns the bytes of what is kept of
        the gradients for the products with the input."""
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
        """Products of the kept `columns` with an input of `x` bytes, for the gradients of the weights `names`."""
        if not self.on:
            return
        self._cast(tape, x, columns)
        wide = 2 if self.by_row else 4
        tape.for_a_moment(columns, x // 2, wide * max(self.matrices.get(name, 0) for name in names))

    def _cast(self, tape: Tape, x: int, *beside: int, both: bool = False) -> None:
        """A cast to rows or to columns, or with `both` to both; with a scale per row the second is made after the
        first."""
        scaled = 0 if self.compiled else x
        tape.for_a_moment(scaled, x // 2, x // 2 if both and self.by_row else 0, *beside)
        tape.for_a_moment(x, *beside)
