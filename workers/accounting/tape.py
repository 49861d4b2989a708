"""A sequence of allocations and frees, and its peak. Pure Python."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """The effect of something on a rank's memory."""

    most: int
    """Bytes at its peak, relative to its beginning."""
    left: int
    """Bytes at its end, relative to its beginning; negative if it frees more than it leaves."""

    def then(self, other: Pass) -> Pass:
        """This and then `other`."""
        return Pass(max(self.most, self.left + other.most), self.left + other.left)


NOTHING = Pass(0, 0)


class Tape:
    """Records what one pass allocates and frees, in order."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, *sizes: int) -> None:
        """Allocate tensors."""
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def free(self, *sizes: int) -> None:
        """Free tensors."""
        self.now -= sum(sizes)

    def for_a_moment(self, *sizes: int) -> None:
        """Allocate tensors and free them again."""
        self.most = max(self.most, self.now + sum(sizes))

    def run(self, other: Pass) -> None:
        """Something that is known as a whole."""
        self.most = max(self.most, self.now + other.most)
        self.now += other.left

    def whole(self) -> Pass:
        """The effect of everything recorded."""
        return Pass(self.most, self.now)
