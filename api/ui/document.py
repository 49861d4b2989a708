"""The one HTML document of the dashboard: which files to load, and what they need to know of the service's rules."""

from __future__ import annotations

import html
import json
from functools import lru_cache
from importlib import metadata
from typing import Any

from api.security.permissions import DASHBOARD_PATH
from api.ui.files import DIGEST, FILES
from service.states import ACTIONS, FINAL, STATE_NAMES
from service.store.tables import METRIC_NAMES

_STYLES = ("style", "parts", "charts", "narrow")
_LOADED_AT_ONCE = ("main.js", *(name for name in FILES if name.startswith("core/")))


@lru_cache
def document_for(base: str) -> str:
    """The document for a service whose addresses begin with `base`."""
    static = f"{html.escape(base)}{DASHBOARD_PATH}/static/{DIGEST}"
    styles = "".join(f'<link rel="stylesheet" href="{static}/{name}.css">\n' for name in _STYLES)
    preloads = "".join(f'<link rel="modulepreload" href="{static}/{name}">\n' for name in _LOADED_AT_ONCE)
    facts = json.dumps(_facts()).replace("<", "\\u003c")  # no text in it ends the element
    return f"""<!doctype html>
<html lang="en" data-base="{html.escape(base)}">
<head>
<meta charset="utf-8">
<title>Manta</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="{static}/icon.svg" type="image/svg+xml">
{styles}{preloads}<script type="application/json" id="facts">{facts}</script>
<script type="module" src="{static}/main.js"></script>
</head>
<body><noscript>The dashboard needs JavaScript; the command <code>manta</code> shows the same.</noscript></body>
</html>
"""


def _facts() -> dict[str, Any]:
    return {
        "version": metadata.version("manta-train"),
        "states": list(STATE_NAMES),
        "final_states": sorted(FINAL),
        "actions": ACTIONS,
        "metrics": list(METRIC_NAMES),
    }
