"""Tokens come to the ranks of their experts and the results back, as if one rank had all experts."""

from __future__ import annotations

import pytest
import torch
from expert_programs import exchanged, through_experts

from manta.workers.config import MoeConfig, ParallelConfig
from manta.workers.parallel.experts.dispatch import exchange_of
from manta.workers.parallel.experts.exchange import LocalExchange

E, H = 12, 5


def of_rank(tokens: int, per_token: int, experts: range, generator: torch.Generator):
    """Rows, a choice among `experts`, and factors."""
    order = torch.rand(tokens, len(experts), generator=generator).argsort(1)[:, :per_token].sort(1).values
    choice = (order + experts.start).to(torch.int32)
    numbers = torch.randn(tokens, H + per_token, generator=generator, dtype=torch.float64)
    return numbers[:, :H].contiguous(), choice, numbers[:, H:].contiguous()


def cases(size: int):
    """(tokens of each rank, experts per token, experts among which they choose)."""
    yield [7] * size, 2, range(E)
    yield [5, *range(size - 1)], 3, range(E)  # the second one has no tokens
    yield [4] * size, 1, range(E // size)  # all experts of other ranks are idle
    yield [0] * size, 2, range(E)
    yield [0] * (size - 1) + [6], 4, range(E - 5, E)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_and_gradients_of_spread_experts_equal_those_of_one_rank(ranks, size, dispatch):
    generator = torch.Generator().manual_seed(size)
    given = [[of_rank(n, k, among, generator) for n in tokens] for tokens, k, among in cases(size)]
    layout = ParallelConfig(data=size, expert=size, expert_dispatch=dispatch)
    by_rank = ranks.run(layout, exchanged, layout, E, given)
    for number, of_ranks in enumerate(given):
        expected = [through_experts(LocalExchange(), each, E, range(E), 0) for each in of_ranks]
        for rank, (wanted, found) in enumerate(zip(expected, (made[number] for made in by_rank), strict=True)):
            for one, other in zip(wanted[:3], found[:3], strict=True):
                assert torch.allclose(one, other, rtol=1e-14, atol=1e-14), (number, rank)
        counts = [sum(column) for column in zip(*(wanted[3] for wanted in expected), strict=True)]
        assert [count for made in by_rank for count in made[number][3]] == counts


def test_tokens_are_gathered_unless_each_goes_to_fewer_experts_than_ranks(ranks):
    def kind(**layout):
        comm = type("Alone", (), {"size": lambda *_: 1, "index": lambda *_: 0})()
        moe = MoeConfig(experts=E, per_token=2, ffn_hidden_size=1)
        return type(exchange_of(comm, ParallelConfig(data=8, **layout), moe)).__name__

    assert kind() == kind(expert=1) == "LocalExchange"
    assert kind(expert=2) == kind(expert=4, expert_dispatch="all_gather") == "GatheredExchange"
    assert kind(expert=4) == kind(expert=2, expert_dispatch="all_to_all") == "SentExchange"
