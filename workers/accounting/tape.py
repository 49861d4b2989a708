"""A sequence of allocations and frees, and its peak. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """What something does to a rank's memory."""

    most: int
    """Bytes at its peak, beyond those at its beginning."""
    left: int
    """Bytes at its end, beyond those at its beginning; negative where it frees more than it leaves."""

    def then(self, other: Pass) -> Pass:
        """Both, one after the other."""
        return Pass(max(self.most, self.left + other.most), self.left + other.left)


NOTHING = Pass(0, 0)


class Tape:
    """Notes what one pass takes and frees, in its order."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, *sizes: int) -> None:
        """Tensors that are allocated."""
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def free(self, *sizes: int) -> None:
        """Tensors that nothing holds any more."""
        self.now -= sum(sizes)

    def for_a_moment(self, *sizes: int) -> None:
        """Tensors that are allocated and freed again."""
        self.most = max(self.most, self.now + sum(sizes))

    def run(self, other: Pass) -> None:
        """Something that is known as a whole."""
        self.most = max(self.most, self.now + other.most)
        self.now += other.left

    def whole(self) -> Pass:
        """All of it."""
        return Pass(self.most, self.now)
