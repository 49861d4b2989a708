"""Rows of the sequence in several runs, against their positions written out."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.parallel.tensor.positions import Positions

runs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=4)


@given(runs, st.integers(1, 4))
def test_equal_parts_of_positions_are_slices_of_their_numbers(drawn, count):
    positions = Positions(tuple((first, first + count * length) for first, length in drawn))
    numbers = [number for first, end in positions.runs for number in range(first, end)]
    assert positions.length == len(numbers)
    assert positions.numbers(torch.device("cpu")).tolist() == numbers
    table = torch.arange(100.0).view(-1, 2).repeat(2, 1)
    assert torch.equal(positions.rows_of(table), table[numbers])
    size = len(numbers) // count
    for index in range(count):
        part = positions.part(index, count)
        assert part.numbers(torch.device("cpu")).tolist() == numbers[index * size : (index + 1) * size]
