"""What the tests of properties draw: always the same with `make test`, which so fails for nobody by chance; with
`--soak` other examples each time, and more of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import TestCase

import pytest
from hypothesis import settings

TIMES_IN_SOAK = 20
"""As many examples as otherwise."""

# How long an example takes is the machine's load, and no property of ours.
settings.register_profile("manta", deadline=None, derandomize=True)
# Set explicitly: where `CI` is in the environment, the default of Hypothesis is the same examples each time.
settings.register_profile("manta-soak", deadline=None, derandomize=False)


def begin(soak: bool) -> None:
    """To be called before any test is imported: settings that a test has of its own begin with what is loaded then."""
    settings.load_profile("manta-soak" if soak else "manta")


def is_property(item: pytest.Item) -> bool:
    """Whether a test draws examples itself."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def draw_more(items: Iterable[pytest.Item]) -> None:
    """Have each of these tests of properties draw TIMES_IN_SOAK as many."""
    holders = [_holder_of_settings(item.obj) for item in items]  # type: ignore[attr-defined]
    for holder, name in {(id(holder), name): (holder, name) for holder, name in holders}.values():
        own = getattr(holder, name)
        setattr(holder, name, settings(own, max_examples=TIMES_IN_SOAK * own.max_examples))


def _holder_of_settings(test: Any) -> tuple[Any, str]:
    """The object that has the settings of a property as an attribute, and its name: the test case of a state machine,
    otherwise the test itself."""
    case = getattr(test, "__self__", None)
    return (type(case), "settings") if isinstance(case, TestCase) else (test, "_hypothesis_internal_use_settings")
