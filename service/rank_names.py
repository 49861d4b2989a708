"""What to say about the ranks that a job has."""

from __future__ import annotations


def no_such_rank(job: str, rank: int, count: int) -> str:
    """The sentence for a `rank` that a `job` of so many ranks does not have."""
    return f"{job} has no rank {rank}; " + (f"its ranks are 0 to {count - 1}" if count > 1 else "its only rank is 0")
