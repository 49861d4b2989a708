"""One tree of additions, whoever does which part of it; told by expressions, and by floats for which order matters."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.parallel.data.tree_sum import Node, TreeSum, buffers, cover


def by_definition(leaves: int, level: int, index: int) -> str:
    """The expression of a node, written out from the leaves' numbers."""
    if level == 0:
        return str(index)
    left = by_definition(leaves, level - 1, 2 * index)
    if (2 * index + 1) << (level - 1) >= leaves:
        return left
    return f"({left}+{by_definition(leaves, level - 1, 2 * index + 1)})"


def whole(leaves: int) -> str:
    """The expression of the root."""
    return by_definition(leaves, math.ceil(math.log2(leaves)), 0)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[range]]:
    """Some leaves, and neighbouring ranges that hold all of them."""
    leaves = draw(st.integers(1, 130))
    cuts = sorted(draw(st.lists(st.integers(0, leaves), max_size=6)))
    return leaves, [range(a, b) for a, b in zip([0, *cuts], [*cuts, leaves], strict=True)]


def added(leaves: int, ranges: list[range], values: list, add) -> object:
    """Each range added as far as it goes, then the ranges."""
    tree = TreeSum(leaves)
    for mine in ranges:
        part = TreeSum(leaves)
        for leaf in mine:
            part.push(Node(0, leaf), values[leaf], add)
        assert tuple(node for node, _ in part.nodes) == cover(leaves, mine.start, mine.stop)
        for node, value in part.nodes:
            tree.push(node, value, add)
    return tree.total()


@given(partitions())
def test_tree_sum_has_the_same_expression_for_every_partition(case):
    leaves, ranges = case
    names = [str(leaf) for leaf in range(leaves)]
    assert added(leaves, ranges, names, lambda left, right: f"({left}+{right})") == whole(leaves)


@given(partitions(), st.integers(0, 1000))
def test_tree_sum_has_the_same_bits_for_every_partition(case, seed):
    leaves, ranges = case
    generator = random.Random(seed)
    values = [generator.choice((1e16, -1e16, 1.0, 1e-3)) * generator.random() for _ in range(leaves)]
    assert added(leaves, ranges, values, lambda a, b: a + b) == added(
        leaves, [range(leaves)], values, lambda a, b: a + b
    )


def test_tree_sum_of_floats_depends_on_the_order():
    values = [1e16, 1.0, -1e16, 1.0]
    assert sum(values) != added(4, [range(4)], values, lambda a, b: a + b)


@pytest.mark.parametrize(
    ("leaves", "expression"), [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (6, "(((0+1)+(2+3))+(4+5))")]
)
def test_tree_sum_expressions_of_small_trees(leaves, expression):
    assert whole(leaves) == expression


@given(partitions())
def test_a_range_is_covered_by_at_most_twice_as_many_nodes_as_the_tree_has_levels(case):
    leaves, ranges = case
    for mine in ranges:
        nodes = cover(leaves, mine.start, mine.stop)
        held = [leaf for node in nodes for leaf in range(node.index << node.level, (node.index + 1) << node.level)]
        assert [leaf for leaf in held if leaf < leaves] == list(mine)
        assert len(nodes) <= max(1, 2 * math.log2(len(mine) + 1))


@given(partitions())
def test_tree_sum_needs_as_many_buffers_as_its_largest_proper_prefix(case):
    leaves, ranges = case
    for mine in ranges:
        prefixes = [len(cover(leaves, mine.start, stop)) for stop in range(mine.start + 1, mine.stop)]
        assert buffers(leaves, mine.start, mine.stop) == max(prefixes, default=0)


@pytest.mark.parametrize(("alone", "expected"), [(1, 0), (2, 1), (4, 2), (8, 3), (16, 4), (128, 7)])
def test_tree_sum_of_one_replica_needs_log2_buffers(alone, expected):
    assert buffers(alone, 0, alone) == expected


def test_a_sum_with_leaves_missing_is_refused():
    tree = TreeSum(4)
    for leaf in range(3):
        tree.push(Node(0, leaf), 1.0, lambda a, b: a + b)
    with pytest.raises(ValueError, match="the sum of 4 leaves is not complete"):
        tree.total()
