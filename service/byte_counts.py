"""Numbers of bytes in readable units. Pure Python."""

from __future__ import annotations


def byte_count(count: float) -> str:
    """`count` bytes, such as 20 B or 1.5 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
