"""The page that a browser without a session gets: how to sign in with a one-time link, and a form for a key."""

from __future__ import annotations

import base64
import hashlib
import html
from http import HTTPStatus

from starlette.responses import HTMLResponse

_SCRIPT = """
document.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [says, base] = [document.querySelector("output"), document.documentElement.dataset.base];
  const headers = { Authorization: `Bearer ${document.querySelector("input").value.trim()}`, "Manta-Rest": "1" };
  try {
    const answer = await fetch(`${base}/v1/links`, { method: "POST", headers });
    if (answer.ok) location.assign(base + (await answer.json()).path);
    else if (answer.status === 401) says.textContent = "This key is unknown, expired or revoked.";
    else says.textContent = (await answer.json()).detail;
  } catch {
    says.textContent = "The service cannot be reached, or the key has characters that no key has.";
  }
});
"""
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; background: light-dark(#f4f5f7, #0e1115);
  color: light-dark(#1a1f26, #e4e8ed); }
main { max-width: 30em; margin: 12vh auto; padding: 26px 30px; border-radius: 10px;
  border: 1px solid light-dark(#e2e5ea, #292f38); background: light-dark(#fff, #161a20); }
h1 { display: flex; gap: 10px; align-items: center; margin: 0 0 14px; font-size: 21px; }
pre { padding: 9px 12px; border-radius: 6px; background: light-dark(#f4f5f7, #0e1115); }
form { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 22px; }
label { width: 100%; }
input, button { font: inherit; padding: 6px 10px; border-radius: 5px; border: 1px solid light-dark(#8b95a1, #5d6875); }
input { flex: 1; min-width: 12em; background: light-dark(#fff, #10141a); color: inherit; }
button { background: #1d63d8; border-color: #1d63d8; color: #fff; cursor: pointer; }
output { width: 100%; color: light-dark(#b22020, #f47a7a); }
"""
_PAGE = """<!doctype html>
<html lang="en" data-base="{base}">
<head><meta charset="utf-8"><title>Sign in – Manta</title><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body><main>
<h1><svg viewBox="0 0 32 32" width="26" aria-hidden="true"><rect width="32" height="32" rx="7" fill="#2563eb"/>
<path d="M4 15c5-1 8-5 12-8 4 3 7 7 12 8-4 2-8 3-10 5l-2 7-2-7c-2-2-6-3-10-5z" fill="#fff"/></svg>Manta</h1>
<p>This browser is not signed in. On a machine where you use Manta, run</p><pre>manta link</pre>
<p>and open the link that it prints. The link works once and expires after ten minutes.</p>
<form><label for="key">Or paste an API key:</label><input id="key" type="password" autocomplete="off" required>
<button>Sign in</button><output></output></form>
</main><script>{script}</script></body></html>
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The empty icon is so that browsers do not ask for /favicon.ico, which would be one more 401.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"default-src 'none'; style-src {_digest(_STYLE)}; script-src {_digest(_SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def sign_in_page(base: str) -> HTMLResponse:
    """The page, for a service whose addresses begin with `base`."""
    page = _PAGE.format(base=html.escape(base), style=_STYLE, script=_SCRIPT)
    return HTMLResponse(page, HTTPStatus.UNAUTHORIZED, headers=_HEADERS)
