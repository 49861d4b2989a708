"""Projects: create, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from manta.api import requests, schemas, views
from manta.api.openapi import json_request
from manta.api.parameters import Control, Cursor, Limit, body_as
from manta.api.problems import MalformedJson, changes, reads
from manta.api.schemas import access as access_schemas
from manta.api.security.access import Caller, request_of_caller
from manta.service.errors import InvalidParameter
from manta.service.store import projects
from manta.service.store.errors import ProjectExists

router = APIRouter(prefix="/v1/projects", tags=["access"])


@router.post(
    "",
    status_code=201,
    openapi_extra=json_request(requests.NewProject),
    responses=changes(MalformedJson, InvalidParameter, ProjectExists),
)
def create_project(
    request: Request,
    control: Control,
    wanted: Annotated[requests.NewProject, Depends(body_as(requests.NewProject))],
) -> access_schemas.Project:
    """Create a project. Keys of the project can only access its jobs."""
    request_of_caller(request).target = wanted.name
    return control.store.write(lambda session: views.project_view(projects.create(session, wanted.name)))


@router.get("", responses=reads(InvalidParameter))
def list_projects(
    control: Control, caller: Caller, limit: Limit = 50, cursor: Cursor = None
) -> schemas.Items[access_schemas.Project]:
    """The key's project, or all projects if the key is valid for all projects, sorted by name."""
    page = control.store.query(projects.page, caller.bound, limit, cursor)
    return schemas.Items(items=[views.project_view(item) for item in page.items], next_cursor=page.next_cursor)
