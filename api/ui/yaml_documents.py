"""YAML that a user writes in the browser, as the document that REST takes. Nothing is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from api.parameters import body_as
from api.security.access import request_of_caller
from workers.protocol.json_codec import spell
from workers.spec.reading import document_in


class Written(BaseModel):
    """What was written."""

    model_config = ConfigDict(extra="forbid")

    text: str
    """YAML."""


async def read_written(request: Request, written: Annotated[Written, Depends(body_as(Written))]) -> Response:
    """The document in it, with relative paths as those of the service's root. Raises SpecError."""
    request_of_caller(request).changes_nothing = True
    body = await run_in_threadpool(_as_json, written.text)  # a long text takes a second
    return Response(body, media_type="application/json")


def _as_json(text: str) -> bytes:
    document: Any = document_in(text, "what you wrote", Path("/"))
    return to_json({"document": spell(document)}, fallback=str)
