"""Sums in a fixed binary tree, whose bits do not depend on which rank adds which part. Pure Python.

The leaves are the micro-batches of a global batch, in order. A node of level l is the sum of up to 2^l neighbouring
leaves: node (l, k) of leaves k 2^l to (k + 1) 2^l - 1, as far as there are any. It is the sum of nodes (l - 1, 2k) and
(l - 1, 2k + 1), or the first of them where the second has no leaves. A rank that holds neighbouring leaves adds what
lies wholly within them; the nodes that are left are added by a rank that has them all. Either way each addition is the
tree's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Node:
    """One sum of the tree."""

    level: int
    """0: a leaf."""
    index: int
    """Index among the nodes of its level."""

    @property
    def parent(self) -> Node:
        """The node that it is added into."""
        return Node(self.level + 1, self.index // 2)


class TreeSum(Generic[Value]):
    """Adds nodes, which are pushed in order, as far as the tree allows."""

    def __init__(self, leaves: int):
        """A tree of `leaves`."""
        self.leaves = leaves
        self.nodes: list[tuple[Node, Value]] = []
        """Sums that cannot be added to anything yet: the fewest nodes that cover what was pushed."""

    def push(self, node: Node, value: Value, add: Callable[[Value, Value], Value]) -> None:
        """Add the node that directly follows the last one; `add` takes the values of a left and a right node. `add` is
        not stored: as a method of the object that holds this sum, it would form a cycle that delays freeing the
        buffers."""
        while True:
            if node.index % 2:
                if not self.nodes or self.nodes[-1][0] != Node(node.level, node.index - 1):
                    break  # its left neighbour is elsewhere
                value = add(self.nodes.pop()[1], value)
            elif (node.index + 1) << node.level < self.leaves or self._is_root(node):
                break  # its right neighbour has not been pushed yet
            node = node.parent
        self.nodes.append((node, value))

    def _is_root(self, node: Node) -> bool:
        return node.index == 0 and 1 << node.level >= self.leaves

    def total(self) -> Value:
        """The whole sum. Raises ValueError if leaves are missing."""
        if len(self.nodes) != 1 or not self._is_root(self.nodes[0][0]):
            raise ValueError(f"the sum of {self.leaves} leaves is not complete: {[node for node, _ in self.nodes]}")
        return self.nodes[0][1]


@cache
def cover(leaves: int, first: int, stop: int) -> tuple[Node, ...]:
    """The fewest nodes of a tree of `leaves` that hold leaves `first` to `stop` - 1 and no others, in order."""
    tree: TreeSum[None] = TreeSum(leaves)
    for leaf in range(first, stop):
        tree.push(Node(0, leaf), None, lambda left, right: None)
    return tuple(node for node, _ in tree.nodes)


@cache
def waiting_after_rounds(leaves: int, at_once: int) -> int:
    """Most nodes that wait at once if the leaves are pushed in rounds of `at_once`, looked at after each round: at most
    1 + log2(leaves)."""
    tree: TreeSum[None] = TreeSum(leaves)
    most = 0
    for leaf in range(leaves):
        tree.push(Node(0, leaf), None, lambda left, right: None)
        if (leaf + 1) % at_once == 0 or leaf + 1 == leaves:
            most = max(most, len(tree.nodes))
    return most


@cache
def buffers(leaves: int, first: int, stop: int) -> int:
    """Most nodes that wait at once while leaves `first` to `stop` - 1 are pushed one by one, not counting the last
    leaf's: the number of buffers needed to add them, in addition to the one in which leaves are computed. At most 2
    log2(stop - first)."""
    tree: TreeSum[None] = TreeSum(leaves)
    most = 0
    for leaf in range(first, stop - 1):
        tree.push(Node(0, leaf), None, lambda left, right: None)
        most = max(most, len(tree.nodes))
    return most
