"""Numbers and ranks as sentences say them. Pure Python."""

from __future__ import annotations


def byte_count(count: float) -> str:
    """`count` bytes, such as 20 B or 1.5 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def no_such_rank(job: str, rank: int, count: int) -> str:
    """The sentence for a `rank` that a `job` of so many ranks does not have."""
    return f"{job} has no rank {rank}; " + (f"its ranks are 0 to {count - 1}" if count > 1 else "its only rank is 0")
