"""A cloud's metadata service, as a machine in it sees it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class MetadataService:
    """Answers the paths in `answers` (a text, a JSON document, or an int: that status) and 404 for all others. Where a
    header is `required`, whoever does not send it is refused with 401."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.required: dict[str, str] = {}
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                path = self.path.partition("?")[0]
                service.asked.append(f"{self.command} {path}")
                said = service.answers.get(path, 404)
                if path != "/latest/api/token" and any(self.headers.get(k) != v for k, v in service.required.items()):
                    said = 401
                status = said if isinstance(said, int) else 200
                content = (
                    b"" if isinstance(said, int) else (said if isinstance(said, str) else json.dumps(said)).encode()
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = _answer

            def log_message(self, format: str, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
