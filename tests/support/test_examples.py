"""`make test` draws the same examples each time, `make soak` others, and more."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support import examples


@pytest.fixture(autouse=True)
def profile():
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


def drawn(soak, **own):
    """What a property is drawn from twice, whose test has settings of its `own`, and is there with two parameters."""
    examples.begin(soak)
    seen = []

    @settings(**own)
    @given(st.integers())
    def test(number):
        seen.append(number)

    if soak:
        examples.draw_more([SimpleNamespace(obj=test), SimpleNamespace(obj=test)])
    test()
    first = list(seen)
    test()
    return first, seen[len(first) :]


def test_examples_are_the_same_each_time_and_as_many_as_a_test_says():
    first, again = drawn(False, max_examples=7)
    assert first == again and len(first) == 7


def test_with_soak_they_are_others_and_more():
    first, again = drawn(True, max_examples=7, database=None)
    assert first != again and len(first) == 7 * examples.TIMES_IN_SOAK


def test_with_soak_a_state_machine_runs_more_often_too():
    examples.begin(True)
    runs = []

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            runs.append(self)

        @rule(number=st.integers())
        def go_on(self, number):
            pass

    case = Machine.TestCase
    case.settings = settings(max_examples=7, stateful_step_count=2, database=None)
    examples.draw_more([SimpleNamespace(obj=case().runTest), SimpleNamespace(obj=case().runTest)])
    case().runTest()
    assert len(runs) == 7 * examples.TIMES_IN_SOAK


def test_a_continuous_integration_changes_neither():
    program = """
from hypothesis import settings
from tests.support import examples
for soak in (False, True):
    examples.begin(soak)
    assert settings.default.derandomize != soak
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "CI": "true"}, check=True)


def test_this_run_draws_as_it_was_told_to(request):
    assert settings.default.derandomize != request.config.getoption("--soak")
    assert not examples.is_property(request.node)
