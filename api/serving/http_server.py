"""The HTTP server. At the end of the service it ends open streams and waits; uvicorn by itself would give them its
grace period for requests, and then break them off."""

from __future__ import annotations

import logging
import socket

import uvicorn
from fastapi import FastAPI

from api.app_state import state_of


class HttpServer(uvicorn.Server):
    """Serves an app of `api.app.create_app`."""

    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self._app = app
        logging.getLogger("uvicorn.error").addFilter(is_no_hangup)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        state = state_of(self._app)
        state.changes.close()
        state.waits.close()
        await super().shutdown(sockets)


def is_no_hangup(record: logging.LogRecord) -> bool:
    """Whether a record is about something else than a client that has reset its connection, which uvloop raises in what
    is being sent."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error).endswith("the handler is closed"))
