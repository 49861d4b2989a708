"""The parts of `/openapi.json` that FastAPI does not derive by itself: bodies that routes read without its help, the
common form of errors, and the contents of streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from manta.api import requests, schemas
from manta.api.problems import Responses
from manta.api.security.permissions import NEEDS
from manta.workers.config import JobSpec

_COMPONENTS = "#/components/schemas/"
_READ_BY_ROUTES = (
    JobSpec,
    requests.Resize,
    requests.JobChanges,
    requests.ExportRequest,
    requests.FaultRequest,
    requests.TraceRequest,
    requests.DrainRequest,
    requests.PlanDocument,
    requests.NewProject,
    requests.NewKey,
    schemas.Problem,
)
_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key: Authorization: Bearer KEY"},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "manta_session_PORT",
        "description": "What a browser gets from a one-time link. It allows what the key behind it allows. PORT is the "
        "port in the service's address, or `default`",
    },
}
_NEVER_ANSWERED = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> dict[str, Any]:
    """The API's description."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        known = document.setdefault("components", {}).setdefault("schemas", {})
        for model in _READ_BY_ROUTES:
            schema = model.model_json_schema(ref_template=f"{_COMPONENTS}{{model}}")
            known.update(schema.pop("$defs", {}))
            known[model.__name__] = schema
        _remove_fastapi_errors(document)
        _remove_defaults_of_objects(known)
        _add_scopes(document)
        app.openapi_schema = document
    return app.openapi_schema


def _add_scopes(document: dict[str, Any]) -> None:
    """Each operation with the scope that its key needs; none if it needs no key."""
    document["components"]["securitySchemes"] = _SCHEMES
    for path in document["paths"].values():
        for operation in path.values():
            need = NEEDS.get(operation["operationId"])
            roles = [] if need is None else [need.scope.value, *(["installation"] if need.installation else [])]
            operation["security"] = [{scheme: roles} for scheme in _SCHEMES] if need is not None else []


def _remove_fastapi_errors(document: dict[str, Any]) -> None:
    """FastAPI assumes that a request with parameters can be answered with its own kind of 422."""
    for name in _NEVER_ANSWERED:
        document["components"]["schemas"].pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                del operation["responses"]["422"]


def _remove_defaults_of_objects(part: Any) -> None:
    """An object's own fields have their defaults; generators of clients refuse one for an object or a constant."""
    if isinstance(part, dict):
        if isinstance(part.get("default"), dict):
            del part["default"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            _remove_defaults_of_objects(each)


def json_request(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body as `model` itself."""
    schema = {"$ref": f"{_COMPONENTS}{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream(item: type[BaseModel], ends: bool = True) -> Responses:
    """`responses` of a route that also answers with a stream of `item`; `ends`: whether it ends when the job is final.
    The schema is that of one event; OpenAPI 3.1 has no other place for it."""
    message = {
        "type": "object",
        "required": ["id", "data"],
        "properties": {
            "event": {"const": "message"},
            "id": {"type": "string", "description": "position after it, for Last-Event-ID"},
            "data": _json_text({"$ref": f"{_COMPONENTS}{item.__name__}"}),
        },
        "additionalProperties": False,
    }
    state = {"type": "object", "required": ["state"], "properties": {"state": {"type": "string"}}}
    end = {
        "type": "object",
        "description": "the last one: the job is final, and nothing comes after it",
        "required": ["event", "data"],
        "properties": {"event": {"const": "end"}, "id": {"type": "string"}, "data": _json_text(state)},
        "additionalProperties": False,
    }
    return {200: {"content": {"text/event-stream": {"schema": {"anyOf": [message, end] if ends else [message]}}}}}


def _json_text(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
