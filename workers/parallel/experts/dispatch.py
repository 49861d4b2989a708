"""Exchanges of ranks over which the experts of a layer are spread (`parallel.expert`): rank i of e has the i-th of e
equal runs of them. With `parallel.expert_tensor: 1` tensor ranks, which have the same tokens, have different experts:
e / t ranks of the same index in their tensor groups exchange tokens of the experts that they have (`Reach`).

`GatheredExchange`: each rank gets the rows of all tokens of the group, and takes those that its experts were chosen
for; back, the ranks' results are summed. Micro-batches may have fewer tokens on some ranks: all are padded to the
largest, which every rank knows. `SentExchange`: a token's row goes once to each rank that has experts chosen for it,
and the sum of these experts' results comes back.

In both, rows that come are in the order of their source, and of tokens within, and the parts of a token's result are
added in the order of ranks, so that a sum over its experts has the same order as on a rank that has all of them.

Shapes: n tokens, h hidden, E experts, k experts per token, e ranks; r rows that came, m rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.config import MoeConfig, ParallelConfig
from manta.workers.parallel.experts.exchange import Exchange, LocalExchange, NumbersForHost, Plan, Reach


def exchange_of(comm: Comm, layout: ParallelConfig, moe: MoeConfig) -> Exchange:
    """The exchange of all layers of a rank."""
    different = layout.tensor // layout.expert_split
    reach = Reach(moe.experts // layout.expert_size, different, comm.index("tensor") % different)
    if layout.exchange_size == 1:
        return LocalExchange(reach if different > 1 else None)
    return (GatheredExchange if layout.dispatch(moe.per_token) == "all_gather" else SentExchange)(comm, reach)


def own_experts(comm: Comm, layout: ParallelConfig, experts: int) -> range:
    """The numbers of the experts that this rank has, of a layer's `experts`."""
    at, run = comm.grid.coordinates(comm.rank), experts // layout.expert_size
    first = (layout.expert_index(at.tensor, at.data, at.context) or 0) * run
    return range(first, first + run)


def _own_of(comm: Comm, reach: Reach) -> range:
    """The numbers of this rank's experts among those that the exchange reaches."""
    first = comm.index("expert") * reach.run
    return range(first, first + reach.run)


@dataclass(frozen=True)
class _GatheredPlan:
    counts: tuple[int, ...]
    index_m: torch.Tensor
    places_m: torch.Tensor
    """The places of the experts' rows among the choices of all tokens that came, int64."""
    tokens: int
    """Tokens of this rank (n)."""
    most: int
    """Tokens of each rank with padding."""
    per_token: int


@dataclass(frozen=True)
class _GatheredPlanning:
    exchange: GatheredExchange
    choice_rk: torch.Tensor
    gathering: Handle
    tokens: int

    def finished(self) -> _GatheredPlan:
        """Sort the choices of this rank's experts by expert."""
        exchange = self.exchange
        with exchange.comm.step.phase("dispatch"):
            self.gathering.wait()
        own, per_token = exchange.own, self.choice_rk.shape[1]
        local = self.choice_rk.flatten() - own.start
        local = torch.where((local >= 0) & (local < len(own)), local, len(own))
        numbers = local.new_zeros(len(own) + 1, dtype=torch.int64)
        numbers.index_add_(0, local, torch.ones((), dtype=torch.int64, device=local.device).expand(len(local)))
        counting, order = NumbersForHost(numbers), local.sort(stable=True).indices
        counts = tuple(counting.read()[:-1])
        places_m = order[: sum(counts)]
        most = len(self.choice_rk) // exchange.comm.size("expert")
        return _GatheredPlan(counts, places_m // per_token, places_m, self.tokens, most, per_token)


class GatheredExchange:
    """Each rank gets the rows of all tokens of the group."""

    def __init__(self, comm: Comm, reach: Reach):
        self.comm, self.reach, self.own = comm, reach, _own_of(comm, reach)

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> _GatheredPlanning:
        """Begin to gather the choices of all tokens of the group."""
        with self.comm.step.phase("dispatch"):
            reached_nk = self.reach.choice(choice_nk, len(counts_e))
            padded = F.pad(reached_nk, (0, 0, 0, most - len(choice_nk)), value=-1)
            return _GatheredPlanning(self, *self.comm.start_all_gather("expert", padded), len(choice_nk))

    def outward(self, rows_nh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The rows of all tokens of the group, [e x most, h]."""
        return self._gathered(rows_nh, _gathered(plan))

    def back(self, results_rh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The sum over ranks of the results of this rank's tokens."""
        return self._summed(results_rh, _gathered(plan))

    def weights_outward(self, weights_nk: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Of all tokens' factors, those of this rank's experts."""
        gathered = _gathered(plan)
        return self._gathered(weights_nk, gathered).flatten()[gathered.places_m]

    def weights_back(self, grads_m: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The sum over ranks, of which one has a number at each place."""
        gathered, size = _gathered(plan), self.comm.size("expert")
        grads_rk = grads_m.new_zeros(size * gathered.most, gathered.per_token)
        grads_rk.view(-1)[gathered.places_m] = grads_m
        return self._summed(grads_rk, gathered)

    def _gathered(self, rows: torch.Tensor, plan: _GatheredPlan) -> torch.Tensor:
        with self.comm.step.phase("dispatch"):
            missing = plan.most - plan.tokens
            padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()
            return self.comm.all_gather("expert", padded)

    def _summed(self, parts: torch.Tensor, plan: _GatheredPlan) -> torch.Tensor:
        with self.comm.step.phase("combine"):
            return self.comm.reduce_scatter("expert", parts)[: plan.tokens]


def _gathered(plan: Plan) -> _GatheredPlan:
    assert isinstance(plan, _GatheredPlan)
    return plan


@dataclass(frozen=True)
class _SentPlan:
    counts: tuple[int, ...]
    index_m: torch.Tensor
    order_m: torch.Tensor
    """For each row of this rank's experts, sorted by expert, its place among all that came, by source."""
    choices: torch.Tensor
    """The places of this rank's tokens' choices of experts that are reached, sorted by expert, int64."""
    rows: torch.Tensor
    """The token of each row that is sent, int64."""
    tokens: int
    """Tokens of this rank (n)."""
    per_token: int
    sent_rows: Sequence[int]
    """Rows that go to each rank."""
    received_rows: Sequence[int]
    sent_choices: Sequence[int]
    """Choices of experts of each rank."""
    received_choices: Sequence[int]


@dataclass(frozen=True)
class _SentPlanning:
    exchange: SentExchange
    goes_en: torch.Tensor
    """bool [e + 1, n]: to which ranks a token's row goes, and whether it has chosen experts that are not reached."""
    choice_nk: torch.Tensor
    """Numbers among the experts that are reached."""
    numbers: torch.Tensor
    """int64 [e, E + e]: by source, the choices of each expert, and the rows to each rank."""
    gathering: Handle

    def finished(self) -> _SentPlan:
        """Once the numbers are known, exchange which rows the choices are of."""
        exchange, (tokens, per_token) = self.exchange, self.choice_nk.shape
        comm, own, size = exchange.comm, exchange.own, len(self.goes_en) - 1
        with comm.step.phase("dispatch"):
            self.gathering.wait()
        counting = NumbersForHost(self.numbers.flatten())
        # Experts of one rank follow each other, so what is sorted by expert is also sorted by rank.
        choices = self.choice_nk.flatten().sort(stable=True).indices
        places_en = self.goes_en.cumsum(1) - 1
        to_rank = self.choice_nk.flatten()[choices] // len(own)
        row_of_choice = places_en.flatten()[to_rank * tokens + choices // per_token]
        numbers, me, experts = counting.read(), comm.index("expert"), size * len(own)
        by_source = [numbers[first : first + experts + size] for first in range(0, len(numbers), experts + size)]
        own_counts = [of_source[own.start : own.stop] for of_source in by_source]
        sent_rows, received_rows = by_source[me][experts:], [of_source[experts + me] for of_source in by_source]
        sent_choices = [sum(by_source[me][first : first + len(own)]) for first in range(0, experts, len(own))]
        received_choices = [sum(counts) for counts in own_counts]
        sent = sum(sent_choices)  # choices of experts that are not reached are the last
        came = exchange.exchanged(row_of_choice[:sent], sent_choices, received_choices, "dispatch")
        sources = torch.tensor(received_choices, device=came.device)
        firsts = torch.tensor([0, *accumulate(received_rows)][:-1], device=came.device)
        total = sum(received_choices)
        came = came + firsts.repeat_interleave(sources, output_size=total)
        numbers_of_own = torch.arange(len(own), device=came.device).repeat(size)
        each = torch.tensor([count for counts in own_counts for count in counts], device=came.device)
        of_choice = numbers_of_own.repeat_interleave(each, output_size=total)
        order_m = of_choice.sort(stable=True).indices
        going = (~self.goes_en[:size]).flatten().sort(stable=True).indices[: sum(sent_rows)]
        return _SentPlan(
            counts=tuple(map(sum, zip(*own_counts, strict=True))),
            index_m=came[order_m],
            order_m=order_m,
            choices=choices[:sent],
            rows=going % max(tokens, 1),
            tokens=tokens,
            per_token=per_token,
            sent_rows=sent_rows,
            received_rows=received_rows,
            sent_choices=sent_choices,
            received_choices=received_choices,
        )


class SentExchange:
    """A token's row goes once to each rank that has experts chosen for it."""

    def __init__(self, comm: Comm, reach: Reach):
        self.comm, self.reach, self.own = comm, reach, _own_of(comm, reach)

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> _SentPlanning:
        """Begin to tell all ranks how many rows go where."""
        size, tokens = self.comm.size("expert"), len(choice_nk)
        reached_nk = self.reach.choice(choice_nk, len(counts_e))
        goes_ne = torch.zeros(tokens, size + 1, dtype=torch.bool, device=choice_nk.device)
        goes_ne.scatter_(1, (reached_nk // len(self.own)).long(), True)
        numbers = torch.cat([self.reach.counts(counts_e), goes_ne[:, :size].sum(0)])
        with self.comm.step.phase("dispatch"):
            gathered, gathering = self.comm.start_all_gather("expert", numbers.unsqueeze(0))
        return _SentPlanning(self, goes_ne.t().contiguous(), reached_nk, gathered, gathering)

    def outward(self, rows_nh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The rows of tokens that experts of this rank were chosen for."""
        sent = _sent(plan)
        return self.exchanged(rows_nh[sent.rows], sent.sent_rows, sent.received_rows, "dispatch")

    def back(self, results_rh: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The sum of the results of each rank's experts."""
        sent = _sent(plan)
        parts = self.exchanged(results_rh, sent.received_rows, sent.sent_rows, "combine")
        total = parts.new_zeros(sent.tokens, parts.shape[1])
        # One rank after the other, since a GPU adds rows of the same token in no fixed order.
        for rows, part in zip(sent.rows.split(sent.sent_rows), parts.split(sent.sent_rows), strict=True):
            total.index_add_(0, rows, part)
        return total

    def weights_outward(self, weights_nk: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The factors of each rank's experts."""
        sent = _sent(plan)
        going = weights_nk.flatten()[sent.choices]
        return self.exchanged(going, sent.sent_choices, sent.received_choices, "dispatch")[sent.order_m]

    def weights_back(self, grads_m: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The gradients of the factors of this rank's tokens."""
        sent = _sent(plan)
        going, grads = torch.empty_like(grads_m), grads_m.new_zeros(sent.tokens * sent.per_token)
        going[sent.order_m] = grads_m
        grads[sent.choices] = self.exchanged(going, sent.received_choices, sent.sent_choices, "combine")
        return grads.view(-1, sent.per_token)

    def exchanged(
        self, rows: torch.Tensor, lengths: Sequence[int], incoming: Sequence[int], phase: Literal["dispatch", "combine"]
    ) -> torch.Tensor:
        """Send to each rank its part of `rows`, of such lengths; what comes, one rank's part after the other."""
        received = rows.new_empty(sum(incoming), *rows.shape[1:])
        me, parts, places = self.comm.index("expert"), rows.split(list(lengths)), received.split(list(incoming))
        with self.comm.step.phase(phase):
            exchanging = self.comm.start_all_to_all("expert", [[part] for part in parts], [[place] for place in places])
            places[me].copy_(parts[me])
            exchanging.wait()
        return received


def _sent(plan: Plan) -> _SentPlan:
    assert isinstance(plan, _SentPlan)
    return plan
