"""The files that a browser loads, read once: modules, style sheets, the icon."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent / "static"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class StaticFile:
    """One of them."""

    content: bytes
    media_type: str


def _read() -> dict[str, StaticFile]:
    paths = sorted(path for path in _ROOT.rglob("*") if path.suffix in _MEDIA_TYPES)
    return {
        path.relative_to(_ROOT).as_posix(): StaticFile(path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in paths
    }


FILES = _read()
"""By path below `static/`."""
DIGEST = hashlib.sha256(b"\0".join(name.encode() + file.content for name, file in FILES.items())).hexdigest()[:16]
"""Of all of them, and part of their addresses."""
