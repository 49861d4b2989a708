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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.config import MoeConfig, ParallelConfig
from manta.workers.parallel.experts.exchange import Exchange, LocalExchange, NumbersForHost, Reach


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


@dataclass(frozen=True)
class _BetweenRanks:
    """An exchange between the ranks of axis `expert`."""

    comm: Comm
    reach: Reach

    @property
    def own(self) -> range:
        """The numbers of this rank's experts among those that are reached."""
        first = self.comm.index("expert") * self.reach.run
        return range(first, first + self.reach.run)


@dataclass(frozen=True)
class _GatheredPlan:
    comm: Comm
    counts: tuple[int, ...]
    index_m: torch.Tensor
    places_m: torch.Tensor
    """The places of the experts' rows among the choices of all tokens that came, int64."""
    tokens: int
    """Tokens of this rank (n)."""
    most: int
    """Tokens of each rank with padding."""
    per_token: int

    def outward(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The rows of all tokens of the group, [e x most, h]."""
        with self.comm.step.phase("dispatch"):
            missing = self.most - self.tokens
            padded = F.pad(rows_nh, (0, 0, 0, missing)) if missing else rows_nh.contiguous()
            return self.comm.all_gather("expert", padded)

    def back(self, results_rh: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of the results of this rank's tokens."""
        with self.comm.step.phase("combine"):
            return self.comm.reduce_scatter("expert", results_rh)[: self.tokens]

    def weights_outward(self, weights_nk: torch.Tensor) -> torch.Tensor:
        """Of all tokens' factors, those of this rank's experts."""
        return self.outward(weights_nk).flatten()[self.places_m]

    def weights_back(self, grads_m: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, of which one has a number at each place."""
        grads_rk = grads_m.new_zeros(self.comm.size("expert") * self.most, self.per_token)
        grads_rk.view(-1)[self.places_m] = grads_m
        return self.back(grads_rk)


class GatheredExchange(_BetweenRanks):
    """Each rank gets the rows of all tokens of the group."""

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> Callable[[], _GatheredPlan]:
        """Begin to gather the choices of all tokens of the group."""
        with self.comm.step.phase("dispatch"):
            reached_nk = self.reach.choice(choice_nk, len(counts_e))
            padded = F.pad(reached_nk, (0, 0, 0, most - len(choice_nk)), value=-1)
            choice_rk, gathering = self.comm.start_all_gather("expert", padded)
        return partial(self.finished, choice_rk, gathering, len(choice_nk), most)

    def finished(self, choice_rk: torch.Tensor, gathering: Handle, tokens: int, most: int) -> _GatheredPlan:
        """Sort the choices of this rank's experts by expert, once those of all tokens have come."""
        with self.comm.step.phase("dispatch"):
            gathering.wait()
        own, per_token = self.own, choice_rk.shape[1]
        local = choice_rk.flatten() - own.start
        local = torch.where((local >= 0) & (local < len(own)), local, len(own))
        numbers = local.new_zeros(len(own) + 1, dtype=torch.int64)
        numbers.index_add_(0, local, torch.ones((), dtype=torch.int64, device=local.device).expand(len(local)))
        counting, order = NumbersForHost(numbers), local.sort(stable=True).indices
        counts = tuple(counting.read()[:-1])
        places_m = order[: sum(counts)]
        return _GatheredPlan(self.comm, counts, places_m // per_token, places_m, tokens, most, per_token)


@dataclass(frozen=True)
class _SentPlan:
    comm: Comm
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

    def outward(self, rows_nh: torch.Tensor) -> torch.Tensor:
        """The rows of tokens that experts of this rank were chosen for."""
        return _exchanged(self.comm, rows_nh[self.rows], self.sent_rows, self.received_rows, "dispatch")

    def back(self, results_rh: torch.Tensor) -> torch.Tensor:
        """The sum of the results of each rank's experts."""
        parts = _exchanged(self.comm, results_rh, self.received_rows, self.sent_rows, "combine")
        total = parts.new_zeros(self.tokens, parts.shape[1])
        # One rank after the other, since a GPU adds rows of the same token in no fixed order.
        for rows, part in zip(self.rows.split(self.sent_rows), parts.split(self.sent_rows), strict=True):
            total.index_add_(0, rows, part)
        return total

    def weights_outward(self, weights_nk: torch.Tensor) -> torch.Tensor:
        """The factors of each rank's experts."""
        going = weights_nk.flatten()[self.choices]
        return _exchanged(self.comm, going, self.sent_choices, self.received_choices, "dispatch")[self.order_m]

    def weights_back(self, grads_m: torch.Tensor) -> torch.Tensor:
        """The gradients of the factors of this rank's tokens."""
        going, grads = torch.empty_like(grads_m), grads_m.new_zeros(self.tokens * self.per_token)
        going[self.order_m] = grads_m
        grads[self.choices] = _exchanged(self.comm, going, self.received_choices, self.sent_choices, "combine")
        return grads.view(-1, self.per_token)


class SentExchange(_BetweenRanks):
    """A token's row goes once to each rank that has experts chosen for it."""

    def start(self, choice_nk: torch.Tensor, counts_e: torch.Tensor, most: int) -> Callable[[], _SentPlan]:
        """Begin to tell all ranks how many rows go where."""
        size, tokens = self.comm.size("expert"), len(choice_nk)
        reached_nk = self.reach.choice(choice_nk, len(counts_e))
        goes_ne = torch.zeros(tokens, size + 1, dtype=torch.bool, device=choice_nk.device)
        goes_ne.scatter_(1, (reached_nk // len(self.own)).long(), True)
        numbers = torch.cat([self.reach.counts(counts_e), goes_ne[:, :size].sum(0)])
        with self.comm.step.phase("dispatch"):
            gathered, gathering = self.comm.start_all_gather("expert", numbers.unsqueeze(0))
        return partial(self.finished, goes_ne.t().contiguous(), reached_nk, gathered, gathering)

    def finished(
        self, goes_en: torch.Tensor, choice_nk: torch.Tensor, numbers_er: torch.Tensor, gathering: Handle
    ) -> _SentPlan:
        """Once the numbers are known, exchange which rows the choices are of. `goes_en`: bool [e + 1, n], to which
        ranks a token's row goes, and whether it has chosen experts that are not reached; `choice_nk`: numbers among
        those that are; `numbers_er`: int64 [e, E + e], by source, the choices of each expert, and the rows to each
        rank."""
        comm, own, size, (tokens, per_token) = self.comm, self.own, len(goes_en) - 1, choice_nk.shape
        with comm.step.phase("dispatch"):
            gathering.wait()
        counting = NumbersForHost(numbers_er.flatten())
        # Experts of one rank follow each other, so what is sorted by expert is also sorted by rank.
        choices = choice_nk.flatten().sort(stable=True).indices
        places_en = goes_en.cumsum(1) - 1
        to_rank = choice_nk.flatten()[choices] // len(own)
        row_of_choice = places_en.flatten()[to_rank * tokens + choices // per_token]
        numbers, me, experts = counting.read(), comm.index("expert"), size * len(own)
        by_source = [numbers[first : first + experts + size] for first in range(0, len(numbers), experts + size)]
        own_counts = [of_source[own.start : own.stop] for of_source in by_source]
        sent_rows, received_rows = by_source[me][experts:], [of_source[experts + me] for of_source in by_source]
        sent_choices = [sum(by_source[me][first : first + len(own)]) for first in range(0, experts, len(own))]
        received_choices = [sum(counts) for counts in own_counts]
        sent = sum(sent_choices)  # choices of experts that are not reached are the last
        came = _exchanged(comm, row_of_choice[:sent], sent_choices, received_choices, "dispatch")
        sources = torch.tensor(received_choices, device=came.device)
        firsts = torch.tensor([0, *accumulate(received_rows)][:-1], device=came.device)
        total = sum(received_choices)
        came = came + firsts.repeat_interleave(sources, output_size=total)
        numbers_of_own = torch.arange(len(own), device=came.device).repeat(size)
        each = torch.tensor([count for counts in own_counts for count in counts], device=came.device)
        of_choice = numbers_of_own.repeat_interleave(each, output_size=total)
        order_m = of_choice.sort(stable=True).indices
        going = (~goes_en[:size]).flatten().sort(stable=True).indices[: sum(sent_rows)]
        return _SentPlan(
            comm=comm,
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


def _exchanged(
    comm: Comm,
    rows: torch.Tensor,
    lengths: Sequence[int],
    incoming: Sequence[int],
    phase: Literal["dispatch", "combine"],
) -> torch.Tensor:
    """Send to each rank its part of `rows`, of such lengths; what comes, one rank's part after the other."""
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    me, parts, places = comm.index("expert"), rows.split(list(lengths)), received.split(list(incoming))
    with comm.step.phase(phase):
        exchanging = comm.start_all_to_all("expert", [[part] for part in parts], [[place] for place in places])
        places[me].copy_(parts[me])
        exchanging.wait()
    return received
