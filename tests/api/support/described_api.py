"""Holds every answer that a test gets against what `/openapi.json` says about the operation."""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

from tests.api.support.keys import ADMIN, bearer

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Operation:
    """One operation of the API."""

    method: str
    path: str
    document: dict[str, Any]

    @property
    def id(self) -> str:
        return self.document["operationId"]

    def codes(self, status: int) -> list[str]:
        """The codes that its problem documents of `status` may carry."""
        response = self.document["responses"].get(str(status), {"content": {}})
        if PROBLEM not in response["content"]:
            return []
        return response["content"][PROBLEM]["schema"]["properties"]["code"]["enum"]

    @property
    def errors(self) -> dict[int, list[str]]:
        """All codes by status."""
        return {int(status): self.codes(int(status)) for status in self.document["responses"] if int(status) >= 400}

    def takes(self, method: str, path: str) -> bool:
        pattern = re.sub(r"\{\w+\}", "[^/]+", self.path)
        return method == self.method and re.fullmatch(pattern, path) is not None


class DescribedApi:
    """The API as it describes itself."""

    def __init__(self, document: dict[str, Any]):
        self.document = document
        self._validators: dict[str, Any] = {}

    @property
    def operations(self) -> Iterator[Operation]:
        for path, operations in self.document["paths"].items():
            for method, document in operations.items():
                yield Operation(method.upper(), path, document)

    def check(self, response: httpx.Response) -> None:
        """Status, media type, headers and body are as the description says. An event hook of httpx."""
        request = response.request
        takers = [each for each in self.operations if each.takes(request.method, request.url.path)]
        media_type = response.headers.get("content-type", "").partition(";")[0]
        if not takers:
            assert response.status_code < 400 or media_type == PROBLEM, f"{request.method} {request.url}: {media_type}"
            return
        operation = min(takers, key=lambda each: each.path.count("{"))  # OpenAPI: paths without parameters go first
        complaint = f"{operation.id} answered {response.status_code} {media_type}, which it is not known for"
        described = operation.document["responses"].get(str(response.status_code))
        assert described is not None, complaint
        assert media_type in (described.get("content") or [""]), complaint
        for name in described.get("headers", {}):
            if name != "Location" or response.status_code == 201:
                assert name in response.headers, f"{complaint}: {name} is missing"
        if media_type.endswith("json"):
            response.read()
            self.validate(response.json(), described["content"][media_type]["schema"])

    def validate(self, value: Any, schema: dict[str, Any]) -> None:
        """`value` is as `schema`, a part of the description, says."""
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self.document["components"]}
            jsonschema.Draft202012Validator.check_schema(whole)
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        self._validators[key].validate(value)

    def stream_schema(self, path: str) -> dict[str, Any]:
        """What one event of the stream at `path` is."""
        content = self.document["paths"][path]["get"]["responses"]["200"]["content"]["text/event-stream"]
        return content["schema"]


@functools.cache
def description_at(url: str) -> DescribedApi:
    """What the server at `url` says about itself."""
    return DescribedApi(httpx.get(f"{url}/openapi.json", timeout=20, headers=bearer(ADMIN)).json())
