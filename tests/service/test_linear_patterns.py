"""Expressions find what Python's own find, and take no longer for that the worse they are."""

import random
import re

import pytest

from service import linear_patterns
from service.linear_patterns import MOST_CHARACTERS, BadPattern, LinearPattern

ATOMS = (
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\w",
    r"\S",
    "(a|b)",
    "(?:ab)",
    "^",
    "$",
    r"\.",
    "[a-c1]",
    "()",
    "B",
    "[]-]",
)
TIMES = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}", "*?")


def drawn(rng, depth=2):
    text = ""
    for _ in range(rng.randint(0, 4)):
        atom = f"({drawn(rng, depth - 1)})" if depth and rng.random() < 0.3 else rng.choice(ATOMS)
        text += atom + (rng.choice(TIMES) if atom not in "^$" and rng.random() < 0.4 else "")
        text += "|" if rng.random() < 0.15 else ""
    return text


def compare(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        text = ("(?i)" if rng.random() < 0.2 else "") + drawn(rng)
        ours, theirs = LinearPattern(text), re.compile(text, re.DOTALL)
        for _ in range(4):
            line = "".join(rng.choice("abc1.AB -]") for _ in range(rng.randint(0, 8)))
            assert ours.is_in(line) is (theirs.search(line) is not None), (text, line)


def test_expressions_find_what_pythons_own_find():
    compare(seed=1, count=300)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_expressions_find_what_pythons_own_find(seed):
    compare(seed, count=5000)


@pytest.mark.parametrize(
    ("pattern", "line", "matches"),
    [
        (r"loss +\d+\.\d{2}", "step 3 loss  1.25", True), (r"^step \d+$", "step 12", True),
        (r"^step \d+$", "step 12 ", False), ("(?i)ERROR|fail", "it Failed", True), ("[A-Z]", "Ä", False),
        ("(?i)[A-Z]x", "bX", True), (r"\t", "a\tb", True), ("", "", True), ("^$", "", True), ("^$", "a", False),
        (r"a{2,3}b", "xaaab", True), (r"^a{2,3}b", "aaaab", False), ("é+", "caféé", True), (r"\]", "a]", True),
    ],
)  # fmt: skip
def test_what_matches(pattern, line, matches):
    assert LinearPattern(pattern).is_in(line) is matches


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a", "a ( without )"), ("a)", "a ) without ("), ("[a", "a [ without ]"), ("*a", "nothing before it"),
        ("a**", "put it into parentheses"), ("a{x}", "{2,5}"), ("a{3,2}", "the smaller number first"),
        ("a{201}", "at most 200 times"), (r"\1", r"\1 that is not known"), (r"\bx", r"\b that is not known"),
        ("(?=a)", "(?:...)"), ("[z-a]", "a range"), ("a\\", "not known"), ("(a{100}){100}", "stands for too much"),
        ("a" * (MOST_CHARACTERS + 1), "longer than 500"), ("a{1", "{2,5}"),
    ],
)  # fmt: skip
def test_expression_that_is_none_is_refused_with_a_sentence(pattern, why):
    with pytest.raises(BadPattern, match=re.escape(why)):
        LinearPattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "at"),
    [("(", 1), ("a(b(c)", 2), ("(?:a", 1), ("x(?=a)", 2), ("ab[c", 3), ("[^", 1), (r"a\1", 2), ("a\\", 2), ("ab)", 3),
     ("a**", 3), ("a{x}", 2), ("+", 1)],
)  # fmt: skip
def test_where_it_is_wrong_is_a_place_that_it_has(pattern, at):
    with pytest.raises(BadPattern, match=rf"\(at character {at}\)$"):
        LinearPattern(pattern)


def test_expression_that_takes_pythons_own_for_ever_takes_a_step_a_character(monkeypatch):
    steps = []
    step = LinearPattern._step
    monkeypatch.setattr(LinearPattern, "_step", lambda self, *about: steps.append(about) or step(self, *about))
    pattern = LinearPattern("(a*)*b|((a+)+)+$z|(a|a)*c.*x.*y")
    assert not pattern.is_in("a" * 8192)
    assert len(steps) <= 4, "the same few states again and again"


def test_automaton_that_grows_too_large_is_made_anew(monkeypatch):
    monkeypatch.setattr(linear_patterns, "_MOST_KEPT", 10)
    pattern = LinearPattern("(a|b)*a(a|b){6}c")
    rng = random.Random(1)
    for _ in range(50):
        line = "".join(rng.choice("abc") for _ in range(20))
        assert pattern.is_in(line) is (re.search("(a|b)*a(a|b){6}c", line) is not None)
        assert len(pattern._steps) <= 10
