"""The Python client (docs/python.md): `MantaClient` for programs and the command line, `AsyncMantaClient` for event
loops."""

from api.client.async_client import AsyncMantaClient
from api.client.blocking import MantaClient
from api.client.rest_call import ApiError, ServiceUnreachable
from api.schemas import Problem
from api.serving.local_service import find_url

__all__ = ["ApiError", "AsyncMantaClient", "MantaClient", "Problem", "ServiceUnreachable", "find_url"]
