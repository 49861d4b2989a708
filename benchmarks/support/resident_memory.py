"""How much memory a process has, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def forget_peak() -> None:
    """The peak of this process's resident memory (VmHWM) is reset (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def status_bytes(name: str, process: int | str = "self") -> int:
    """A number of a process's status, such as VmRSS (resident now) or VmHWM (at its peak)."""
    return bytes_in(Path(f"/proc/{process}/status").read_text(encoding="ascii"), name)


def bytes_in(status: str, name: str) -> int:
    """A number of a process's status, such as VmRSS, in bytes, from the text of the status."""
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))
