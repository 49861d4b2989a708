"""How tokens come to their experts, and the experts' results back to the tokens.

An exchange makes a plan, which has two operations, of which each is the other's backward. Here is the one without
communication, of a rank whose tensor group has all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def outward(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The tokens' rows at this rank's experts [r, h]."""
        ...

    def back(self, results_rh: torch.Tensor) -> torch.Tensor:
        """The sum of the experts' results for each token [n, h]. The memory of the results may be reused."""
        ...

    def weights_outward(self, weights_nk: torch.Tensor) -> torch.Tensor:
        """The factor of each of the experts' rows [m]."""
        ...

    def weights_back(self, grads_m: torch.Tensor) -> torch.Tensor:
        """The gradient of the factors [n, k] from those of the experts' rows."""
        ...


class Exchange(Protocol):
    """The way to the experts and back, of one layer."""

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> Callable[[], Plan]:
        """Begin to plan for tokens that have chosen these experts, int32 [n, k], ascending, and each expert so many
        times, int64 [E]. `most`: the most tokens of any of the ranks that exchange them. What is returned gives the
        plan, for whose numbers the host waits."""
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

    def outward(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The rows themselves."""
        return rows_nh

    def back(self, results_rh: torch.Tensor) -> torch.Tensor:
        """The results themselves."""
        return results_rh

    def weights_outward(self, weights_nk: torch.Tensor) -> torch.Tensor:
        """Sorted like the rows."""
        return weights_nk.flatten()[self.order_m]

    def weights_back(self, grads_m: torch.Tensor) -> torch.Tensor:
        """Sorted by token again."""
        grads = grads_m.new_zeros(self.choices)
        grads[self.order_m] = grads_m
        return grads.view(-1, self.per_token)


@dataclass(frozen=True)
class LocalExchange:
    """For a rank whose tensor group has all experts: rows stay where they are."""

    reach: Reach | None = None
    """The rank's experts, if others of the group have others."""

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> Callable[[], _LocalPlan]:
        """Sort the choices by expert, and within by token."""
        if self.reach is not None:
            choice_nk, counts_e = self.reach.choice(choice_nk, len(counts_e)), self.reach.counts(counts_e)
        order = choice_nk.flatten().sort(stable=True).indices
        numbers, per_token = NumbersForHost(counts_e), choice_nk.shape[1]

        def finished() -> _LocalPlan:
            counts = tuple(numbers.read())
            return _LocalPlan(counts, order[: sum(counts)], per_token, len(order))

        return finished


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
