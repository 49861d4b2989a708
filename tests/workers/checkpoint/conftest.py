"""Fixtures of the tests of checkpoints."""

from state_fixtures import corpus, one_thread

__all__ = ["corpus", "one_thread"]
