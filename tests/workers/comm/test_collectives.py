"""Collectives over the links give torch's sums, in any size, with the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
from rank_threads import connected

from manta.workers.comm.links import Links
from manta.workers.comm.links_backend import SMALL_BYTES, Collectives, maximum

SIZES = (2, 3, 4)
# Elements: one, odd, just below and above the border between the two ways of adding, and large and odd.
LENGTHS = (1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 300_007)


def part_of(rank: int, length: int) -> torch.Tensor:
    """What `rank` puts in; sums of them round, so that order shows."""
    return torch.empty(length).normal_(generator=torch.Generator().manual_seed(100 * rank + length % 97))


def in_order(size: int, length: int) -> torch.Tensor:
    """The sum in the order of ranks."""
    total = part_of(0, length).clone()
    for rank in range(1, size):
        total += part_of(rank, length)
    return total


def along(links: Links, size: int, star: bool = False) -> Collectives:
    """Collectives over all ranks."""
    return Collectives(links, 3, list(range(size)), star)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("star", [False, True], ids=["all linked", "star"])
def test_all_reduce_adds_in_the_order_of_ranks_on_every_rank(size, star):
    def body(links: Links) -> list[torch.Tensor]:
        tensors = [part_of(links.rank, length) for length in LENGTHS]
        for tensor in tensors:
            along(links, size, star).start_all_reduce(tensor).wait()
        return tensors

    for sums in connected(size, body, star=star):
        for tensor, length in zip(sums, LENGTHS, strict=True):
            assert torch.equal(tensor, in_order(size, length)), (length, "the same bits, whichever way it went")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("star", [False, True], ids=["all linked", "star"])
@pytest.mark.parametrize("length", [5, 20_001])
def test_all_reduce_with_maximum_gives_the_largest_elements(size, star, length):
    def body(links: Links) -> torch.Tensor:
        tensor = part_of(links.rank, length)
        along(links, size, star).start_all_reduce(tensor, maximum).wait()
        return tensor

    expected = torch.stack([part_of(rank, length) for rank in range(size)]).amax(0)
    assert all(torch.equal(largest, expected) for largest in connected(size, body, star=star))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40_001])
def test_all_gather_concatenates_in_the_order_of_ranks(size, rows):
    def body(links: Links) -> torch.Tensor:
        mine = part_of(links.rank, 2 * rows).view(rows, 2)
        out = torch.empty(rows * size, 2)
        along(links, size).start_all_gather(out, mine).wait()
        return out

    expected = torch.cat([part_of(rank, 2 * rows).view(rows, 2) for rank in range(size)])
    assert all(torch.equal(gathered, expected) for gathered in connected(size, body))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40_001])
def test_reduce_scatter_gives_each_rank_its_slice_of_the_sum(size, rows):
    def body(links: Links) -> torch.Tensor:
        out = torch.empty(rows, 2)
        along(links, size).start_reduce_scatter(out, part_of(links.rank, 2 * rows * size).view(rows * size, 2)).wait()
        return out

    expected = in_order(size, 2 * rows * size).view(size * rows, 2)
    assert torch.equal(torch.cat(connected(size, body)), expected)


@pytest.mark.parametrize("size", SIZES)
def test_reduced_slice_may_replace_the_ranks_own_slice_in_place(size):
    def body(links: Links) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = part_of(links.rank, 2 * size)
        before, own = tensor.clone(), slice(2 * links.rank, 2 * links.rank + 2)
        along(links, size).start_reduce_scatter(tensor[own], tensor).wait()
        before[own] = in_order(size, 2 * size)[own]
        return tensor, before

    for tensor, expected in connected(size, body):
        assert torch.equal(tensor, expected), "the same bits, and nothing else has changed"


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_delivers_to_each_rank_the_tensors_sent_to_it(size):
    """Rank i sends i + 1 tensors to each other rank, of lengths that depend on both."""

    def length(source: int, to: int) -> int:
        return 1 + 40_000 * source + to

    def sent(source: int, to: int) -> list[torch.Tensor]:
        return [part_of(source, length(source, to)) + number for number in range(source + 1)]

    def body(links: Links) -> list[list[torch.Tensor]]:
        outgoing = [sent(links.rank, to) for to in range(size)]
        incoming = [[torch.zeros(length(i, links.rank)) for _ in range(i + 1)] for i in range(size)]
        along(links, size).start_all_to_all(outgoing, incoming).wait()
        return incoming

    for rank, received in enumerate(connected(size, body)):
        for source, tensors in enumerate(received):
            for tensor, expected in zip(tensors, sent(source, rank), strict=True):
                assert torch.equal(tensor, torch.zeros_like(tensor) if source == rank else expected)


def test_collectives_leave_their_inputs_unchanged():
    def body(links: Links) -> bool:
        mine = part_of(links.rank, 40_000)
        along(links, 2).start_reduce_scatter(torch.empty(20_000), mine).wait()
        along(links, 2).start_all_gather(torch.empty(80_000), mine).wait()
        return torch.equal(mine, part_of(links.rank, 40_000))

    assert connected(2, body) == [True, True]


def test_subgroup_collective_leaves_other_ranks_alone():
    """Ranks 1 and 3 of four add, while 0 and 2 add something else on another channel."""

    def body(links: Links) -> float:
        tensor = torch.tensor([float(10**links.rank)])
        ranks = [0, 2] if links.rank % 2 == 0 else [1, 3]
        Collectives(links, links.rank % 2, ranks).start_all_reduce(tensor).wait()
        return tensor.item()

    assert connected(4, body) == [101.0, 1010.0, 101.0, 1010.0]
