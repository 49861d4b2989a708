"""The Python client (docs/python.md): `Client` for programs and the command line, `AsyncClient` for event
loops."""

from manta.api.client.async_client import AsyncClient
from manta.api.client.blocking import Client
from manta.api.client.rest_call import ApiError, ServiceUnreachable
from manta.api.schemas import Problem
from manta.api.serving.local_service import find_url

__all__ = ["ApiError", "AsyncClient", "Client", "Problem", "ServiceUnreachable", "find_url"]
