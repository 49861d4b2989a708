"""Where a process is: its Python stacks, requested by a signal, and what the kernel says about it.

The signal's handler is written in C and needs no interpreter lock, so a trainer answers even while something holds that
lock. A stopped process cannot answer; for it there is only the information in /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from manta.workers.paths import rank_stem
from manta.workers.system.processes import process_state
from manta.workers.system.regular_files import make_folder, open_regular, remove

STACKS_SIGNAL = signal.SIGUSR2
MAX_CHARACTERS = 16_000
_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.02


def stacks_path(folder: str | Path, rank: int) -> Path:
    """The file into which `rank` writes its stacks on request."""
    return Path(folder) / f"{rank_stem(rank)}.stacks"


def answer_with_stacks(folder: str | Path, rank: int) -> None:
    """In the trainer: from now on STACKS_SIGNAL makes this process write the stacks of all its threads."""
    path = stacks_path(folder, rank)
    with contextlib.suppress(OSError):  # without room in shared memory there are no stacks, and nothing else is lost
        make_folder(path.parent)
        remove(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # open until the process ends
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


async def capture_stacks(pid: int, path: Path) -> str:
    """The stacks of all threads of process `pid`, which writes them to `path`; the kernel's information if it does not
    answer within a second. At most MAX_CHARACTERS."""
    state = process_state(pid)
    text = await _asked(pid, path) if state is not None and state.letter not in "TtZX" else ""
    return (text or from_kernel(pid))[-MAX_CHARACTERS:]


async def _asked(pid: int, path: Path) -> str:
    before = _size(path)
    if before is None or not _survives(pid):
        return ""  # it cannot answer yet, and the file there is from the previous process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
    seen = before
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            while True:  # there is no event for a file that has stopped growing
                await asyncio.sleep(_POLL_SECONDS)
                now = _size(path) or 0
                if now > before and now == seen and not _is_answering(pid):
                    break
                seen = now
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(before)
        return file.read().decode(errors="replace")
    return ""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _survives(pid: int) -> bool:
    """Whether the process survives STACKS_SIGNAL because it handles or ignores it."""
    return _is_in_mask(pid, "SigCgt:", "SigIgn:")


def _is_answering(pid: int) -> bool:
    """Whether STACKS_SIGNAL has not reached the main thread yet, or is being handled by it, which blocks the signal:
    stacks are written in pieces, and a process that has to wait for a processor in between may take any time."""
    return _is_in_mask(pid, "SigPnd:", "ShdPnd:", "SigBlk:")


def _is_in_mask(pid: int, *names: str) -> bool:
    """Whether STACKS_SIGNAL is in one of these masks of signals of the process and its main thread."""
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith(names)]
        return any(mask >> (STACKS_SIGNAL - 1) & 1 for mask in masks)
    return False


def from_kernel(pid: int) -> str:
    """The readable part of what /proc says about process `pid`: its state, and where in the kernel it waits."""
    facts = []
    for name in ("status", "wchan", "stack", "syscall"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
            if name == "status":
                fields = ("State", "Threads", "SigPnd", "ShdPnd", "SigBlk", "voluntary_ctxt", "nonvoluntary_ctxt")
                text = "\n".join(line for line in text.splitlines() if line.startswith(fields))
            if text and text != "0":
                facts.append(f"{name}: {text}" if "\n" not in text else text)
    return "\n".join(facts)
