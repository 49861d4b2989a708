"""How tokens come to their experts, and the experts' results back to the tokens.

An exchange has two operations, of which each is the other's backward. Here is the one without communication, of a rank
whose tensor group has all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Reach:
    """The experts of a layer that an exchange reaches. All, unless tensor ranks have different ones: number j of t has
    the runs i t + j of the experts' equal runs, i being the rank's place in the exchange."""

    run: int
    """Experts of each rank."""
    tensor: int = 1
    """Number of tensor ranks with different experts (t)."""
    index: int = 0
    """This one's index among them (j)."""

    def choice(self, choice_nk: torch.Tensor, experts: int) -> torch.Tensor:
        """The chosen ones' numbers among those that are reached; for others, the number of these. `experts`: of the
        layer."""
        if self.tensor == 1:
            return choice_nk
        runs = choice_nk // self.run
        numbers = runs // self.tensor * self.run + choice_nk % self.run
        return torch.where(runs % self.tensor == self.index, numbers, experts // self.tensor)

    def counts(self, counts_e: torch.Tensor) -> torch.Tensor:
        """How often each expert that is reached was chosen."""
        return counts_e.view(-1, self.tensor, self.run)[:, self.index].flatten()


class Plan(Protocol):
    """Where the tokens of one micro-batch go. Kept from forward to backward, and never made again."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert that this rank has; the host knows them."""
        ...

    @property
    def index_m(self) -> torch.Tensor:
        """Which of the rows that came each expert's rows are, [m]: sorted by expert, and within by their order. Each
        row that came is at most once among an expert's."""
        ...


class Exchange(Protocol):
    """The way to the experts and back, of one layer."""

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> Planning:
        """Begin to plan for tokens that have chosen these experts, int32 [n, k], ascending, and each expert so many
        times, int64 [E]. `most`: the most tokens of any of the ranks that exchange them."""
        ...

    def outward(self, rows_nh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The tokens' rows at this rank's experts [r, h]."""
        ...

    def back(self, results_rh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The sum of the experts' results for each token [n, h]. The memory of the results may be reused."""
        ...

    def weights_outward(self, weights_nk: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The factor of each of the experts' rows [m]."""
        ...

    def weights_back(self, grads_m: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The gradient of the factors [n, k] from those of the experts' rows."""
        ...


class Planning(Protocol):
    """A plan that is being made."""

    def finished(self) -> Plan:
        """The plan: the host waits for its numbers."""
        ...


@dataclass(frozen=True)
class _LocalPlan:
    counts: tuple[int, ...]
    order_m: torch.Tensor
    """The places of the experts' rows among all tokens' choices, int64 [m]."""
    per_token: int
    choices: int
    """Number of these choices (n k)."""

    @property
    def index_m(self) -> torch.Tensor:
        return self.order_m // self.per_token


@dataclass(frozen=True)
class _LocalPlanning:
    counts: NumbersForHost
    order: torch.Tensor
    per_token: int

    def finished(self) -> _LocalPlan:
        counts = tuple(self.counts.read())
        return _LocalPlan(counts, self.order[: sum(counts)], self.per_token, len(self.order))


class LocalExchange:
    """For a rank whose tensor group has all experts: rows stay where they are."""

    def __init__(self, reach: Reach | None = None):
        """`reach`: the rank's experts, if others of the group have others."""
        self.reach = reach

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> _LocalPlanning:
        """Sort the choices by expert, and within by token."""
        per_token = choice_nk.shape[1]
        if self.reach is not None:
            choice_nk, counts_e = self.reach.choice(choice_nk, len(counts_e)), self.reach.counts(counts_e)
        order = choice_nk.flatten().sort(stable=True).indices
        return _LocalPlanning(NumbersForHost(counts_e), order, per_token)

    def outward(self, rows_nh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The rows themselves."""
        return rows_nh

    def back(self, results_rh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The results themselves."""
        return results_rh

    def weights_outward(self, weights_nk: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Sorted like the rows."""
        assert isinstance(plan, _LocalPlan)
        return weights_nk.flatten()[plan.order_m]

    def weights_back(self, grads_m: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Sorted by token again."""
        assert isinstance(plan, _LocalPlan)
        grads = grads_m.new_zeros(plan.choices)
        grads[plan.order_m] = grads_m
        return grads.view(-1, plan.per_token)


class NumbersForHost:
    """Numbers on their way from the device to the host, which meanwhile starts other work."""

    def __init__(self, numbers: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Sequence[int]:
        """The numbers. The host waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers
