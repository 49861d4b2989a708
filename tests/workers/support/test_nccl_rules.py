"""What the replay of programs finds, one rule after the other, on programs of a few lines."""

from __future__ import annotations

from group_programs import Communicator, Meet, Message, Program, Start, Sum, Use, Wait
from nccl_rules import findings, least_kernels_at_once

BOTH, UP, DOWN = (Communicator(name, (0, 1)) for name in ("world", "up", "down"))


class Writer:
    """Writes a program; lines are numbered."""

    def __init__(self) -> None:
        self.program = Program()
        self._number = 0

    def _line(self) -> str:
        return f"line {len(self.program) + 1}"

    def sums(self, on: Communicator = BOTH, size: int = 8, wait: bool = True, line: str = "sums") -> Writer:
        """A collective that is waited for."""
        return self._start(on, Sum("all_reduce sum", "float32", size), line, wait)

    def sends(self, peer: int, on: Communicator = UP, size: int = 8, wait: bool = True, label: str = "") -> Writer:
        """A message."""
        return self._start(on, (Message(True, peer, size, label),), self._line(), wait)

    def receives(self, peer: int, on: Communicator = UP, size: int = 8, wait: bool = True, label: str = "") -> Writer:
        """The other end."""
        return self._start(on, (Message(False, peer, size, label),), self._line(), wait)

    def _start(self, on: Communicator, what: Sum | tuple[Message, ...], line: str, wait: bool) -> Writer:
        self._number += 1
        self.program.append(Start(self._number, on, what, line))
        return self.waits(self._number) if wait else self

    def waits(self, number: int) -> Writer:
        """For an operation, by its number from 1."""
        self.program.append(Wait(number, self._line()))
        return self

    def uses(self, number: int) -> Writer:
        """Memory of an operation."""
        self.program.append(Use(number, self._line()))
        return self

    def meets(self, name: str, *ranks: int) -> Writer:
        """Other hosts."""
        self.program.append(Meet(name, ranks, self._line()))
        return self


def mistakes(*writers: Writer, **more: int) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds and lines of what is wrong with the programs of ranks 0, 1, ..."""
    return [(each.kind, each.lines) for each in findings([writer.program for writer in writers], **more)]


def test_nccl_rules_accept_collectives_in_one_order():
    assert mistakes(Writer().sums().sums(size=4), Writer().sums().sums(size=4)) == []


def test_collectives_of_a_communicator_meet_in_order():
    assert mistakes(Writer().sums(size=8, line="a").sums(size=4), Writer().sums(size=4, line="b").sums(size=8)) == [
        ("mismatch", ("a", "b"))
    ]


def test_nccl_rules_find_collectives_from_different_lines():
    assert mistakes(Writer().sums(line="a"), Writer().sums(line="b")) == [("mismatch", ("a", "b"))]


def test_a_collective_waits_for_all():
    kinds = dict(mistakes(Writer().sums(), Writer().sums().sums(line="alone")))
    assert kinds["mismatch"] == ("alone", "line 2")
    assert kinds["deadlock"] == ("line 4", "line 2")


def test_send_ends_only_when_it_is_received():
    """Two that send to each other before they receive: buffers may hide it, rendezvous does not."""
    first = Writer().sends(1, UP).receives(1, DOWN)
    assert mistakes(first, Writer().sends(0, DOWN).receives(0, UP)) == [("deadlock", ("line 2", "line 2"))]
    unblocked = Writer().sends(1, UP, wait=False).receives(1, DOWN).waits(1)
    assert mistakes(unblocked, Writer().sends(0, DOWN, wait=False).receives(0, UP).waits(1)) == []


def test_opposite_sends_need_two_communicators():
    """On one, the second message of each waits for the first."""
    apart = [
        Writer().receives(peer, on, wait=False).sends(peer, to).waits(1)
        for peer, on, to in ((1, DOWN, UP), (0, UP, DOWN))
    ]
    assert mistakes(*apart) == []
    shared = [Writer().receives(peer, UP, wait=False).sends(peer, UP).waits(1) for peer in (1, 0)]
    assert mistakes(*shared) == [("deadlock", ("line 2", "line 2"))]


def test_messages_must_match_in_bytes_and_content():
    assert mistakes(Writer().sends(1, size=8), Writer().receives(0, size=4)) == [("mismatch", ("line 1", "line 1"))]
    sent, received = Writer().sends(1, label="first"), Writer().receives(0, label="second")
    assert mistakes(sent, received) == [("mismatch", ("line 1", "line 1"))]


def test_batched_messages_have_no_order():
    def batch(peer: int, *ends: bool) -> Writer:
        writer = Writer()
        writer.program += [Start(1, BOTH, tuple(Message(sends, peer, 8) for sends in ends), "batch"), Wait(1, "wait")]
        return writer

    assert mistakes(batch(1, True, False), batch(0, True, False)) == []
    assert [kind for kind, _ in mistakes(batch(1, True), batch(0, True))] == ["mismatch", "mismatch", "deadlock"]


def test_communicators_of_the_same_ranks_need_one_order():
    first, second = Writer().sums(UP).sums(DOWN), Writer().sums(DOWN).sums(UP)
    assert mistakes(first, second) == [("deadlock", ("line 2", "line 2"))]


def test_nccl_rules_need_no_order_if_both_kernels_start_before_a_wait():
    programs = [Writer().sums(a, wait=False).sums(b, wait=False).waits(1).waits(2) for a, b in ((UP, DOWN), (DOWN, UP))]
    assert mistakes(*programs) == []
    assert least_kernels_at_once([each.program for each in programs]) == 2
    assert [kind for kind, _ in mistakes(*programs, kernels_at_once=1)] == ["deadlock"]


def test_nccl_rules_block_later_operations_behind_one_that_cannot_begin():
    """Where streams share a queue of the device: the second receive waits for the first, and the send for both."""
    first = Writer().receives(1, DOWN, wait=False).receives(1, DOWN, wait=False).sends(1, UP).waits(1).waits(2)
    assert mistakes(first, Writer().sends(0, DOWN).sends(0, DOWN).receives(0, UP)) == []
    second = Writer().receives(0, UP).sends(0, DOWN).sends(0, DOWN)
    assert mistakes(first, second) == [("deadlock", ("line 2", "line 2"))]


def test_hosts_must_meet_in_one_order():
    first, second = Writer().meets("a", 0, 1).meets("b", 0, 1), Writer().meets("b", 0, 1).meets("a", 0, 1)
    assert mistakes(first, first) == []
    assert mistakes(first, second) == [("deadlock", ("line 1", "line 1"))]


def test_memory_of_a_collective_must_be_waited_for_before_use():
    other = Writer().sums()
    assert mistakes(Writer().sums(wait=False).uses(1).waits(1), other) == [("not waited for", ("sums", "line 2"))]
    assert mistakes(Writer().sums(wait=False), other) == [("not waited for", ("sums", "sums"))]
