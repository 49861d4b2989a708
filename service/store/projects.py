"""All queries about projects."""

from __future__ import annotations

import re
import time

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from manta.service.identity import PROJECT_PATTERN
from manta.service.store.errors import InvalidCursor, ProjectExists, ProjectNotFound
from manta.service.store.installation_tables import Project
from manta.service.store.paging import Cursors, Page


def create(session: Session, name: str) -> Project:
    """A new project. Raises ProjectExists."""
    project = Project(name=name, created_at=time.time())
    try:
        with session.begin_nested():
            session.add(project)
    except IntegrityError as error:
        raise ProjectExists(name) from error
    return project


def get(session: Session, name: str) -> Project:
    """The project. Raises ProjectNotFound."""
    project = session.get(Project, name) if _is_name(name) else None
    if project is None:
        raise ProjectNotFound(name)
    return project


def page(session: Session, bound: str | None, limit: int = 50, cursor: str | None = None) -> Page[Project]:
    """Projects by name; with `bound` only that one. Raises InvalidCursor."""
    cursors = Cursors("projects", project=bound)
    query = select(Project).order_by(Project.name).limit(limit + 1)
    if bound is not None:
        query = query.where(Project.name == bound)
    if cursor is not None:
        last = cursors.decode(cursor)
        if not _is_name(last):
            raise InvalidCursor
        query = query.where(Project.name > last)
    return Page.of(list(session.scalars(query)), limit, cursors, lambda project: project.name)


def _is_name(text: str) -> bool:
    return re.fullmatch(PROJECT_PATTERN, text) is not None
