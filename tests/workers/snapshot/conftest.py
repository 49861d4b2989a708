"""Fixtures of the tests of snapshots."""

from state_fixtures import corpus, one_thread

__all__ = ["corpus", "one_thread"]
