"""Seconds of the experts of one layer: the router, the products of few rows each, and how tokens come to the ranks of
their experts and back. Pure Python.

Shapes: n tokens of the micro-batch, h hidden, f inner width of an expert on the rank, E experts, of which each token
goes to k, e expert-parallel ranks, r rows of the rank's experts: n k with e = 1, and on average with e > 1, where the
busiest rank counts, with `Software.imbalance` times as many; with whole experts on t tensor ranks n k / t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from manta.service.planner.communication import Groups, exchange_seconds, gather_seconds
from manta.service.planner.operations import WIDE, Budget, product_seconds
from manta.service.planner.software import Software
from manta.workers.accounting.activation_bytes import ExpertRows, planned_rows, tokens_of, width_of
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import Experts

SCORES = 8
"""Times that kernels of the router read or write a score of every expert: scores, their order, sums."""
STALL = 20
"""Host operations that a device waits for after the host has read how many rows each expert has: none are queued
then."""
ROUTING = 20
"""Small kernels of a router, and of the order of rows."""
OF_EXPERT = (5, 11)
"""Kernels of one expert besides its products, forward and backward: rows taken and added, its activation, factors."""

Elements = Callable[[Budget, float], None]
"""Adds an element-wise kernel that moves so many bytes."""


@dataclass(frozen=True)
class ExpertTime:
    """Times of one layer's experts on the busiest rank."""

    spec: JobSpec
    groups: Groups
    software: Software
    experts: Experts
    frozen: frozenset[str]
    """Names, within the layer, of parameters that are not trained."""
    elements: Elements

    @cached_property
    def counts(self) -> ExpertRows:
        """Rows of the busiest rank."""
        return planned_rows(self.spec, self.software.imbalance)

    def _bytes(self, rows: int) -> int:
        """Bytes of the layer's input, or result, for so many rows."""
        return rows * self.experts.x.columns * width_of(self.spec)

    def _grouped(self, matrices: list[tuple[int, int, int]]) -> tuple[float, int]:
        """Seconds of one product [m, k] x [k, n] for each expert of the rank, and kernels."""
        machine, count, width = self.groups.cluster.machine, len(self.experts.weights), width_of(self.spec)
        batch, times = (count, 1) if self.software.groups_experts else (1, count)
        seconds = sum(times * product_seconds(machine, m, n, k, batch, width) for m, n, k in matrices)
        return seconds, times * len(matrices)

    def _one_by_one(self, kernels: int) -> int:
        """So many kernels for each expert of the rank, or for all together."""
        return kernels * (1 if self.software.groups_experts else len(self.experts.weights))

    def _products(self, budget: Budget, *matrices: tuple[int, int]) -> None:
        """Products of each expert's rows, with n results each from k inputs."""
        each = -(-self.counts.all // len(self.experts.weights))
        seconds, kernels = self._grouped([(each, n, k) for n, k in matrices])
        budget.products += seconds
        budget.operations += kernels

    def exchange(self, budget: Budget) -> None:
        """Tokens to the ranks of their experts, or results back."""
        group, cluster = self.groups.expert, self.groups.cluster
        if group.size == 1:
            return
        came = self._bytes(self.counts.came)
        gathers = self.spec.layout.dispatch(self.experts.per_token) == "all_gather"
        budget.expert += (gather_seconds if gathers else exchange_seconds)(group, cluster, came)
        budget.expert += cluster.machine.constants.skew_seconds
        budget.operations += 4

    def forward(self, budget: Budget) -> None:
        """The router, tokens to their experts, products, results back and added."""
        machine, tokens, width = self.groups.cluster.machine, tokens_of(self.spec)[0], width_of(self.spec)
        h, f, count, rows = self.experts.x.columns, self.experts.inner, self.experts.experts, self.counts.all
        self.elements(budget, (width + WIDE) * tokens * h)
        budget.products += product_seconds(machine, tokens, count, h, 1, WIDE)
        self.elements(budget, SCORES * WIDE * tokens * count)
        budget.operations += ROUTING + self._one_by_one(OF_EXPERT[0])
        budget.stalls += STALL * machine.constants.host_seconds * machine.has_gpus
        self.exchange(budget)
        self.elements(budget, 2 * self._bytes(rows))
        self._products(budget, (f, h), (f, h))
        self.elements(budget, self._activation_moves * width * rows * f)
        self._products(budget, (h, f))
        self.exchange(budget)
        self.elements(budget, self._bytes(rows + tokens))

    def backward(self, budget: Budget) -> None:
        """Gradients of the input by way of experts and of the router."""
        machine, tokens, width = self.groups.cluster.machine, tokens_of(self.spec)[0], width_of(self.spec)
        h, f, count, rows = self.experts.x.columns, self.experts.inner, self.experts.experts, self.counts.all
        self.exchange(budget)
        self.elements(budget, 2 * self._bytes(rows))
        self._products(budget, (f, h))
        self.elements(budget, 2 * self._activation_moves * width * rows * f)
        self._products(budget, (h, f), (h, f))
        self.exchange(budget)
        self.elements(budget, self._bytes(rows + tokens))
        self.elements(budget, SCORES * WIDE * tokens * count)
        budget.products += 2 * product_seconds(machine, tokens, h, count, 1, WIDE)
        budget.operations += ROUTING + self._one_by_one(OF_EXPERT[1])

    def weights(self, budget: Budget) -> tuple[int, int]:
        """Products for the gradients of trained experts, whose inputs may come again. Returns the number of kernels,
        and elements of these gradients."""
        h, f, each = self.experts.x.columns, self.experts.inner, -(-self.counts.all // len(self.experts.weights))
        names = [[f"{weight.name}.weight" not in self.frozen for weight in one] for one in self.experts.weights]
        trained = sum(map(sum, names))
        if self.software.sends_rows_again and any(gate or up for gate, up, _ in names):
            self.exchange(budget)
        seconds, kernels = self._grouped([(f, h, each), (f, h, each), (h, f, each)])
        part = trained / (3 * len(names))
        budget.products += part * seconds
        budget.operations += round(2 * part * kernels)
        return round(part * kernels), trained * f * h

    @property
    def _activation_moves(self) -> int:
        """Times that a row's inner elements are read or written by the activation and the token's weight."""
        return 3 if self.software.fused else 8
