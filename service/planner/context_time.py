"""What context parallelism adds to core attention: the scores that the busiest rank computes, and the communication of
keys and values. Pure Python.

Shapes: s sequence, c context ranks, each with s/c tokens of every sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from manta.service.planner.communication import Groups, gather_seconds
from manta.service.planner.operations import WIDE
from manta.workers.accounting.activation_bytes import tokens_of, width_of
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import Attention


def scores_computed(spec: JobSpec, block: int = 1) -> float:
    """Part of the s^2 scores of a causal attention that the busiest context rank computes: of a run of tokens half the
    scores with itself, in blocks of `block` tokens, each of which is computed as a whole, and all with tokens before.
    Under zigzag all ranks compute equally much; under contiguous the last rank 2 - 1/c times the mean."""
    layout, s = spec.layout, spec.model.sequence_length

    def of_run(runs: int) -> float:
        """Part of the scores of a run with itself, if there are `runs` of them."""
        if block == 1:
            return 0.5
        blocks = -(-s // (runs * block))
        return (blocks + 1) / (2 * blocks)

    if layout.context == 1 or layout.context_method == "all_to_all":
        return of_run(1) / layout.context
    if layout.context_order == "contiguous":
        return (layout.context - 1 + of_run(layout.context)) / layout.context**2
    runs = 2 * layout.context
    return (0.5 * (1 - 1 / runs) + of_run(runs) / runs) / layout.context


@dataclass(frozen=True)
class ContextTime:
    """Communication of one layer's attention within its context group."""

    spec: JobSpec
    groups: Groups
    attention: Attention

    @property
    def method(self) -> str:
        """How keys and values are exchanged."""
        return self.spec.layout.context_method or "all_gather"

    def _gather(self, width: int) -> float:
        """Seconds of a gather, or a reduce-scatter, of everyone's keys and values in elements of `width` bytes."""
        size = width * 2 * self.attention.keys * self.groups.context.size * tokens_of(self.spec)[0]
        return gather_seconds(self.groups.context, self.groups.cluster, size)

    def seconds(self, work: float, backward: bool) -> float:
        """Seconds of a micro-batch that `work` seconds of attention, which hops may overlap, do not hide.

        all_gather: keys and values are gathered, in backward again, and their gradients are reduced in fp32. ring: they
        take c - 1 hops, each while a block is computed, and gradients in fp32 take one more, to their owners (a hop is
        hidden from s/c >= 2 (F/B)(g/a) tokens on). all_to_all: queries, keys, values and results are exchanged.
        """
        width = width_of(self.spec)
        if self.method == "all_to_all":
            columns = 2 * self.attention.y.columns + 2 * self.attention.keys
            size = width * columns * tokens_of(self.spec)[0]
            return gather_seconds(self.groups.context, self.groups.cluster, size)
        whole = self._gather(width) + (self._gather(WIDE) if backward else 0.0)
        if self.method == "all_gather":
            return whole
        hops, last = self.groups.context.size - 1, self._gather(WIDE) if backward else 0.0
        return max(0.0, whole - work * hops / (hops + 1)) + last / hops

    def waits(self, backward: bool) -> int:
        """Collectives that wait for late ranks."""
        return 2 if backward or self.method == "all_to_all" else 1

    @property
    def merged_bytes(self) -> float:
        """Memory traffic of merging the results of blocks, in fp32: read twice and written once."""
        times = {"all_to_all": 0, "all_gather": 1}.get(self.method, self.groups.context.size - 1)
        return 3.0 * WIDE * times * tokens_of(self.spec)[0] * self.attention.y.columns

    def operations(self, backward: bool) -> int:
        """Operations of the host: of each block of attention, and of communication."""
        size = self.groups.context.size
        return {"all_to_all": 8, "all_gather": 8}.get(self.method, 8 * size) * (2 if backward else 1)
