"""Programs with one mistake each, as somebody could make it in the engine; drawn from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from group_programs import Communicator, Meet, Message, Program, Start, Sum, Use, Wait

Programs = list[Program]
Spoiler = Callable[[Programs, random.Random], Programs | None]
"""Makes its mistake somewhere; None where the programs have no place for it."""


def spoiled(
    programs: Programs, seed: int, spoilers: dict[str, Spoiler] | None = None
) -> Iterator[tuple[str, Programs]]:
    """Each mistake once, by its name, as far as the programs have a place for it; by default those of SPOILERS."""
    for name, spoil in (SPOILERS if spoilers is None else spoilers).items():
        made = spoil(programs, random.Random(f"{seed} {name}"))
        if made is not None:
            yield name, made


def _with(programs: Programs, rank: int, program: Program) -> Programs:
    return [*programs[:rank], program, *programs[rank + 1 :]]


def _starts(programs: Programs, fits: Callable[[Start], bool]) -> list[tuple[int, int]]:
    """(rank, place) of the operations that fit."""
    return [
        (rank, place)
        for rank, program in enumerate(programs)
        for place, entry in enumerate(program)
        if isinstance(entry, Start) and fits(entry)
    ]


def _is_message(start: Start) -> bool:
    return not isinstance(start.what, Sum) and len(start.what) == 1


def _sends(start: Start) -> bool:
    return _is_message(start) and start.what[0].sends  # type: ignore[index, union-attr]


def _receives(start: Start) -> bool:
    return _is_message(start) and not _sends(start)


def _is_sum(start: Start) -> bool:
    return isinstance(start.what, Sum)


def _is_exchange(start: Start) -> bool:
    """A hop of a ring, an all-to-all."""
    return not isinstance(start.what, Sum) and len(start.what) > 1


def _of_unit(kind: str) -> Callable[[Start], bool]:
    """Whole weights of ZeRO 3, or gradients."""
    return lambda start: isinstance(start.what, Sum) and start.what.kind == kind and "data/units.py" in start.line


def _of_experts(kind: str) -> Callable[[Start], bool]:
    return lambda start: isinstance(start.what, Sum) and start.what.kind == kind and "experts/" in start.line


def _one(programs: Programs, draw: random.Random, fits: Callable[[Start], bool]) -> tuple[int, int, Start] | None:
    places = _starts(programs, fits)
    if not places:
        return None
    rank, place = draw.choice(places)
    return rank, place, programs[rank][place]  # type: ignore[return-value]


def _dropped(fits: Callable[[Start], bool]) -> Spoiler:
    """An operation is left out, and its wait with it."""

    def spoil(programs: Programs, draw: random.Random) -> Programs | None:
        chosen = _one(programs, draw, fits)
        if chosen is None:
            return None
        rank, _, start = chosen
        left = [each for each in programs[rank] if getattr(each, "number", None) != start.number]
        return _with(programs, rank, left)

    return spoil


def _changed(fits: Callable[[Start], bool], change: Callable[[Start, Programs, int], Start | None]) -> Spoiler:
    """An operation is another one on one rank."""

    def spoil(programs: Programs, draw: random.Random) -> Programs | None:
        chosen = _one(programs, draw, fits)
        if chosen is None:
            return None
        rank, place, start = chosen
        other = change(start, programs, rank)
        if other is None:
            return None
        return _with(programs, rank, [*programs[rank][:place], other, *programs[rank][place + 1 :]])

    return spoil


def _fewer_bytes(start: Start, programs: Programs, rank: int) -> Start:
    if isinstance(start.what, Sum):
        return replace(start, what=replace(start.what, bytes=start.what.bytes - 4))
    return replace(start, what=(replace(start.what[0], bytes=start.what[0].bytes - 4), *start.what[1:]))


def _other_kind(start: Start, programs: Programs, rank: int) -> Start:
    assert isinstance(start.what, Sum)
    return replace(
        start, what=replace(start.what, kind="all_gather" if "reduce" in start.what.kind else "all_reduce sum")
    )


def _other_type(start: Start, programs: Programs, rank: int) -> Start:
    assert isinstance(start.what, Sum)
    return replace(start, what=replace(start.what, type="bfloat16" if start.what.type != "bfloat16" else "float16"))


def _other_peer(start: Start, programs: Programs, rank: int) -> Start | None:
    assert not isinstance(start.what, Sum)
    message = start.what[0]
    others = [each for each in range(len(programs)) if each not in (rank, message.peer)]
    if not others:
        return None
    wrong = replace(message, peer=others[0])
    return replace(start, what=(wrong,), on=Communicator(start.on.group, tuple(sorted((rank, others[0])))))


def _other_communicator(start: Start, programs: Programs, rank: int) -> Start | None:
    mine = {each.on for each in programs[rank] if isinstance(each, Start) and isinstance(each.what, Sum)}
    others = sorted(mine - {start.on}, key=str)
    return replace(start, on=others[0]) if others else None


def _next_on_communicator(program: Program, place: int) -> int | None:
    """Where the next operation on the communicator of that at `place` is started."""
    on = program[place].on  # type: ignore[union-attr]
    behind = range(place + 1, len(program))
    return next((at for at in behind if isinstance(program[at], Start) and program[at].on == on), None)  # type: ignore[union-attr]


def _swapped(fits: Callable[[Start], bool]) -> Spoiler:
    """Two operations that follow each other on a communicator change places on one rank."""

    def spoil(programs: Programs, draw: random.Random) -> Programs | None:
        places = []
        for rank, place in _starts(programs, fits):
            then = _next_on_communicator(programs[rank], place)
            if then is not None and not _same(programs[rank][place], programs[rank][then]):  # type: ignore[arg-type]
                places.append((rank, place, then))
        if not places:
            return None
        rank, first, second = draw.choice(places)
        program = list(programs[rank])
        one, other = program[first], program[second]
        assert isinstance(one, Start) and isinstance(other, Start)
        # The numbers stay in their places: what is waited for there is what is started there.
        program[first], program[second] = replace(other, number=one.number), replace(one, number=other.number)
        return _with(programs, rank, program)

    return spoil


def _same(one: Start, other: Start) -> bool:
    return (one.what, one.line) == (other.what, other.line)


def _receives_before_it_sends(programs: Programs, draw: random.Random) -> Programs | None:
    """A rank waits for the answer before it sends what is to be answered: the gradient of what it sends forward, where
    nothing else is sent on the way meanwhile."""
    places = []
    for rank, place in _starts(programs, _sends):
        at = _wait_for_answer(programs[rank], place)
        then = _next_on_communicator(programs[rank], place)
        if at is not None and (then is None or at < then):
            places.append((rank, place, at))
    if not places:
        return None
    rank, place, at = draw.choice(places)
    program = list(programs[rank])
    number = program[place].number  # type: ignore[union-attr]
    moved = [program[place], next(each for each in program if isinstance(each, Wait) and each.number == number)]
    rest = [each for each in program[: at + 1] if each not in moved]
    return _with(programs, rank, [*rest, *moved, *(each for each in program[at + 1 :] if each not in moved)])


def _wait_for_answer(program: Program, place: int) -> int | None:
    """Where the gradient of what is sent forward at `place` is waited for."""
    send: Message = program[place].what[0]  # type: ignore[union-attr, index, assignment]
    if not send.label.startswith("forward"):
        return None
    answer = Message(False, send.peer, send.bytes, send.label.replace("forward", "backward"))
    numbers = {each.number for each in program if isinstance(each, Start) and each.what == (answer,)}
    behind = range(place + 1, len(program))
    return next((at for at in behind if isinstance(each := program[at], Wait) and each.number in numbers), None)


def _without_wait(used: bool, fits: Callable[[Start], bool] = lambda start: True) -> Spoiler:
    """An operation is started and not waited for: its memory is `used` later, or not."""

    def spoil(programs: Programs, draw: random.Random) -> Programs | None:
        places = []
        for rank, program in enumerate(programs):
            uses = {each.number for each in program if isinstance(each, Use)}
            fitting = {each.number for each in program if isinstance(each, Start) and fits(each)}
            places += [
                (rank, at)
                for at, each in enumerate(program)
                if isinstance(each, Wait) and (each.number in uses) == used and each.number in fitting
            ]
        if not places:
            return None
        rank, at = draw.choice(places)
        return _with(programs, rank, programs[rank][:at] + programs[rank][at + 1 :])

    return spoil


def _one_communicator_for_both_directions(programs: Programs, draw: random.Random) -> Programs | None:
    """On all ranks: what is sent up and what is sent down the pipeline share a stream."""
    if not _starts(programs, _is_message):
        return None

    def renamed(entry: Start) -> Start:
        return replace(entry, on=replace(entry.on, group="pipeline")) if _is_message(entry) else entry

    return [[renamed(each) if isinstance(each, Start) else each for each in program] for program in programs]


def _hosts_meet_in_another_order(programs: Programs, draw: random.Random) -> Programs | None:
    """One rank makes two groups in the other order."""
    rank = draw.randrange(len(programs))
    places = [at for at, each in enumerate(programs[rank]) if isinstance(each, Meet) and len(each.ranks) > 1]
    pairs = [(a, b) for a, b in itertools.pairwise(places) if _shares_a_peer(programs[rank], a, b)]
    if not pairs:
        return None
    first, second = draw.choice(pairs)
    program = list(programs[rank])
    program[first], program[second] = program[second], program[first]
    return _with(programs, rank, program)


def _shares_a_peer(program: Program, first: int, second: int) -> bool:
    one, other = program[first], program[second]
    assert isinstance(one, Meet) and isinstance(other, Meet)
    return len(set(one.ranks) & set(other.ranks)) > 1


def _made_at_first_use(programs: Programs, draw: random.Random) -> Programs | None:
    """One rank does not take part where a communicator is made."""
    rank = draw.randrange(len(programs))
    places = [at for at, each in enumerate(programs[rank]) if isinstance(each, Meet) and each.name.startswith("comm")]
    if not places:
        return None
    at = draw.choice(places)
    return _with(programs, rank, programs[rank][:at] + programs[rank][at + 1 :])


SPOILERS: dict[str, Spoiler] = {
    "a send is missing": _dropped(_sends),
    "a receive is missing": _dropped(_receives),
    "a collective is missing": _dropped(_is_sum),
    "a message goes to another rank": _changed(_sends, _other_peer),
    "a message comes from another rank": _changed(_receives, _other_peer),
    "a message has fewer bytes": _changed(_is_message, _fewer_bytes),
    "a collective has fewer bytes": _changed(_is_sum, _fewer_bytes),
    "a collective is of another kind": _changed(_is_sum, _other_kind),
    "a collective is of another type": _changed(_is_sum, _other_type),
    "a collective is on another communicator": _changed(_is_sum, _other_communicator),
    "two collectives change places": _swapped(_is_sum),
    "two messages change places": _swapped(_is_message),
    "an answer is waited for before the question": _receives_before_it_sends,
    "memory is used without a wait": _without_wait(used=True),
    "an operation is never waited for": _without_wait(used=False),
    "both directions share a communicator": _one_communicator_for_both_directions,
    "groups are made in another order": _hosts_meet_in_another_order,
    "a communicator is made without one of its ranks": _made_at_first_use,
}


def _mistakes_in(whats: dict[str, Callable[[Start], bool]]) -> dict[str, Spoiler]:
    return {
        f"{what} {mistake}": spoil
        for what, fits in whats.items()
        for mistake, spoil in {
            "is missing": _dropped(fits),
            "has fewer bytes": _changed(fits, _fewer_bytes),
            "changes places with the next": _swapped(fits),
            "is not waited for": _without_wait(used=True, fits=fits),
        }.items()
    }


OF_LARGE_MODELS = _mistakes_in(
    {
        "a hop": _is_exchange,
        "a unit's gather": _of_unit("all_gather"),
        "a unit's reduction": _of_unit("reduce_scatter"),
    }
)
"""Mistakes in what context parallelism and ZeRO 3 communicate."""

OF_EXPERTS = {
    "all_gather": _mistakes_in({"a dispatch": _of_experts("all_gather"), "a combine": _of_experts("reduce_scatter")}),
    "all_to_all": _mistakes_in({"rows' numbers": _of_experts("all_gather"), "an exchange": _is_exchange}),
}
"""Mistakes in the exchanges of experts."""
