"""Regular expressions whose search time is proportional to the length of the text, whatever the expression: it is
compiled to a nondeterministic automaton, and that lazily, as texts need it, to a deterministic one (K. Thompson,
"Regular Expression Search Algorithm", CACM 11(6), 1968). Python's own regular expressions backtrack, and since they
hold the interpreter's lock a bad one stops the whole process.

Supported are: characters, `.`, classes as `[a-z]`, `\\d \\w \\s` and their opposites, groups, `|`, `*`, `+`, `?`,
`{m,n}`, `^`, `$`, and `(?i)` at the beginning. A line matches if a part of it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from workers.errors import MantaError

MOST_CHARACTERS = 500
MOST_STATES = 1_000
MOST_REPEATS = 200
_MOST_KEPT = 20_000
"""How many steps of the deterministic automaton are kept before it is rebuilt."""
_NAMED: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda letter: letter.isalnum() or letter == "_",
    "s": str.isspace,
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Test = Callable[[str], bool]
"""A test of one character."""


class BadPattern(MantaError):
    """The expression is invalid, or not supported."""


@dataclass
class _State:
    """A state of the nondeterministic automaton: it consumes one character, or continues without one."""

    test: Test | None = None
    at: str | None = None
    """Passes only at the text's beginning (^) or end ($)."""
    following: list[int] = field(default_factory=list)


class LinearPattern:
    """A compiled expression. Not safe for use by several threads at once."""

    def __init__(self, pattern: str):
        """Raises BadPattern, whose message says where and why."""
        if len(pattern) > MOST_CHARACTERS:
            raise BadPattern(f"is longer than {MOST_CHARACTERS} characters")
        self.pattern = pattern
        self._states: list[_State] = []
        self.ignores_case = pattern.startswith("(?i)")
        parser = _Parser(self, pattern, 4 if self.ignores_case else 0)
        self._first, last = parser.whole()
        self._goal = last
        self._begin = self._closed([self._first], at_start=True)
        self._again = self._closed([self._first])
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def state(self, test: Test | None = None, at: str | None = None, following: Iterable[int] = ()) -> int:
        """Create a state and return its number. Raises BadPattern if there are too many."""
        if len(self._states) == MOST_STATES:
            raise BadPattern("stands for too much: shorten what is repeated")
        self._states.append(_State(test, at, [*following]))
        return len(self._states) - 1

    def lead(self, number: int, to: int) -> None:
        """Let a state lead to another one."""
        self._states[number].following.append(to)

    def is_in(self, text: str) -> bool:
        """Whether a part of `text` matches."""
        if self.ignores_case:
            text = text.lower()
        here, steps, goal = self._begin, self._steps, self._goal
        for letter in text:
            if goal in here:
                return True
            step = here, letter
            following = steps.get(step)
            if following is None:
                following = self._step(here, letter)
            here = following
        return goal in here or goal in self._closed(here, at_start=not text, at_end=True)

    def one(self, letter: str) -> Test:
        """The test for one character."""
        wanted = letter.lower() if self.ignores_case else letter
        return lambda given: given == wanted

    def _step(self, here: frozenset[int], letter: str) -> frozenset[int]:
        if len(self._steps) >= _MOST_KEPT:
            self._steps.clear()
        reached = [to for each in here if (test := self._states[each].test) is not None and test(letter)
                   for to in self._states[each].following]  # fmt: skip
        following = self._closed(reached) | self._again
        self._steps[here, letter] = following
        return following

    def _closed(self, some: Iterable[int], at_start: bool = False, at_end: bool = False) -> frozenset[int]:
        """These states and those that are reachable from them without a character."""
        reached, waiting = set[int](), [*some]
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            reached.add(number)
            state = self._states[number]
            passes = {None: True, "^": at_start, "$": at_end}[state.at]
            if state.test is None and passes:
                waiting += state.following
        return frozenset(reached)


Piece = tuple[int, int]
"""A part of an automaton: its first and its last state."""


class _Parser:
    """Parses an expression, from left to right, into the states of a pattern."""

    def __init__(self, into: LinearPattern, text: str, at: int):
        self._into, self._text, self._at = into, text, at

    def whole(self) -> Piece:
        piece = self._alternatives()
        if self._at < len(self._text):
            raise self._bad("has a ) without (")
        return piece

    def _bad(self, why: str, at: int | None = None) -> BadPattern:
        """`at`: position of the problem; default: the next character."""
        return BadPattern(f"{why} (at character {(self._at if at is None else at) + 1})")

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        letter = self._next
        self._at += 1
        return letter

    def _alternatives(self) -> Piece:
        pieces = [self._sequence()]
        while self._next == "|":
            self._at += 1
            pieces.append(self._sequence())
        last = self._into.state()
        for _, end in pieces:
            self._into.lead(end, last)
        return self._into.state(following=[first for first, _ in pieces]), last

    def _sequence(self) -> Piece:
        first = last = self._into.state()
        while self._next and self._next not in "|)":
            begin, end = self._repeated()
            self._into.lead(last, begin)
            last = end
        return first, last

    def _repeated(self) -> Piece:
        began = self._at
        piece = self._one()
        ended = self._at
        least, most = self._times()
        if (least, most) == (1, 1):
            return piece
        return self._copies(began, ended, piece, least, most)

    def _copies(self, began: int, ended: int, piece: Piece, least: int, most: int | None) -> Piece:
        """Repeat a piece, which was read from `began` to `ended`; `most` None: any number of times."""
        first = last = self._into.state()
        after, go_on = self._into.state(), self._at
        for number in range(least if most is None else most):
            if number >= least:
                self._into.lead(last, after)
            if number:
                self._at = began
                piece = self._one()
                assert self._at == ended
            self._into.lead(last, piece[0])
            last = piece[1]
        if most is None:
            if least:
                self._into.lead(piece[1], piece[0])
            else:
                self._into.lead(last, piece[0])
                self._into.lead(piece[1], last)
        self._into.lead(last, after)
        self._at = go_on
        return first, after

    def _times(self) -> tuple[int, int | None]:
        """How often the preceding piece may be repeated."""
        times: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._next in times and self._next:
            bounds = times[self._take()]
        elif self._next == "{":
            bounds = self._counted()
        else:
            return 1, 1
        if self._next == "?":  # non-greedy: whether there is a match does not depend on it
            self._at += 1
        if self._next and self._next in "*+?{":
            raise self._bad("repeats what is repeated already: put it into parentheses")
        return bounds

    def _counted(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not (low.isascii() and low.isdigit() and (high == "" or (high.isascii() and high.isdigit()))):
            raise self._bad(r"has a { that begins no number of times, such as {2,5}: write \{ for the character")
        least, most = int(low), int(high) if high else None if comma else int(low)
        if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
            raise self._bad(f"may repeat at most {MOST_REPEATS} times, the smaller number first")
        self._at = end + 1
        return least, most

    def _one(self) -> Piece:
        letter = self._take()
        if letter == "(":
            return self._group()
        if letter in "^$":
            return self._joined(self._into.state(at=letter))
        if letter in "*+?{":
            self._at -= 1
            raise self._bad(f"has a {letter} with nothing before it that could be repeated")
        if letter == ".":
            return self._joined(self._into.state(lambda given: True))
        if letter == "[":
            return self._joined(self._into.state(self._class()))
        test = self._escaped() if letter == "\\" else self._into.one(letter)
        return self._joined(self._into.state(test))

    def _joined(self, first: int) -> Piece:
        last = self._into.state()
        self._into.lead(first, last)
        return first, last

    def _group(self) -> Piece:
        begin = self._at - 1
        if self._next == "?":
            if self._text[self._at : self._at + 2] != "?:":
                raise self._bad("has a (? that is not known here: only (?:...) is, and (?i) at the beginning", begin)
            self._at += 2
        piece = self._alternatives()
        if self._take() != ")":
            raise self._bad("has a ( without )", begin)
        return piece

    def _escaped(self) -> Test:
        letter = self._take()
        test = _NAMED.get(letter.lower()) if letter else None
        if test is not None:
            return test if letter.islower() else lambda given: not test(given)
        return self._into.one(self._escaped_letter(letter))

    def _escaped_letter(self, letter: str) -> str:
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if not letter or letter.isalnum():
            raise self._bad(f"has a \\{letter} that is not known here", self._at - 2)
        return letter

    def _class(self) -> Test:
        begin, negated = self._at - 1, self._next == "^"
        self._at += negated
        tests: list[Test] = []
        while self._next != "]" or not tests:
            if not self._next:
                raise self._bad("has a [ without ]", begin)
            tests.append(self._part_of_class())
        self._at += 1
        return lambda given: any(test(given) for test in tests) is not negated

    def _part_of_class(self) -> Test:
        low = self._letter_of_class()
        if not isinstance(low, str):
            return low
        if self._next != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return self._into.one(low)
        self._at += 1
        high = self._letter_of_class()
        if not isinstance(high, str) or high < low:
            raise self._bad("has a range whose end does not follow its beginning")
        return self._range(low, high)

    def _range(self, low: str, high: str) -> Test:
        if not self._into.ignores_case:
            return lambda given: low <= given <= high
        return lambda given: low <= given <= high or low <= given.upper() <= high

    def _letter_of_class(self) -> str | Test:
        letter = self._take()
        if letter != "\\":
            return letter
        if self._next.lower() in _NAMED and self._next:
            return self._escaped()
        return self._escaped_letter(self._take())
