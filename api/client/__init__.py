"""The Python client (docs/python.md): `MantaClient` for programs and the command line, `AsyncMantaClient` for event
loops."""

from api.client.async_client import AsyncMantaClient
from api.client.blocking import MantaClient
from api.client.rest_call import ApiError, ServiceUnreachable

__all__ = ["ApiError", "AsyncMantaClient", "MantaClient", "ServiceUnreachable"]
