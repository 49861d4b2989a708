"""Which code a process runs: two processes with the same answer train to the same bits."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def own_code() -> str:
    """Sixteen hexadecimal digits of a SHA-256 over the source files of this package."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
