"""Manta: elastic 3D-parallel training on Ray. These are the names that programs use; each is loaded at its first use.

`Client`, `AsyncClient` with `calls`, `ApiError`, `ServiceUnreachable`: talk to a service (docs/python.md).
`JobSpec`, `read_document`: a job, and the YAML file that describes one (docs/job-spec.md).
`plan`: layouts, time and memory of a job, before it runs (docs/planner.md).
`ray_train`: the engine inside of Ray Train (docs/ray_train.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manta.api.client import ApiError as ApiError
    from manta.api.client import AsyncClient as AsyncClient
    from manta.api.client import Client as Client
    from manta.api.client import ServiceUnreachable as ServiceUnreachable
    from manta.api.client import calls as calls
    from manta.api.client.plan import plan as plan
    from manta.workers.config import JobSpec as JobSpec
    from manta.workers.integrations import ray_train as ray_train
    from manta.workers.spec.reading import read_document as read_document

_PLACES = {
    "ApiError": "manta.api.client:ApiError",
    "AsyncClient": "manta.api.client:AsyncClient",
    "Client": "manta.api.client:Client",
    "JobSpec": "manta.workers.config:JobSpec",
    "ServiceUnreachable": "manta.api.client:ServiceUnreachable",
    "calls": "manta.api.client.calls",
    "plan": "manta.api.client.plan:plan",
    "ray_train": "manta.workers.integrations.ray_train",
    "read_document": "manta.workers.spec.reading:read_document",
}
"""Where each name comes from: a module, or what it has. On a node to which Ray has shipped the code, only
`manta.workers` is there."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, part = _PLACES[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, part) if part else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
