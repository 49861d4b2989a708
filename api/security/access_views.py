"""Rows of keys, projects and the audit, as answers of the API."""

from __future__ import annotations

from api.schemas import access as access_schemas
from api.views import moment, moment_or_none
from service.keys.identity import Identity
from service.store import access_tables


def project_view(project: access_tables.Project) -> access_schemas.Project:
    """A project."""
    return access_schemas.Project(name=project.name, created_at=moment(project.created_at))


def key_view(key: access_tables.ApiKey) -> access_schemas.ApiKey:
    """What is known of an API key."""
    return access_schemas.ApiKey(
        id=key.id,
        name=key.name,
        user=key.user,
        project=key.project,
        scope=key.scope,
        installation=key.installation,
        created_at=moment(key.created_at),
        expires_at=moment_or_none(key.expires_at),
        revoked_at=moment_or_none(key.revoked_at),
        highest_priority=key.highest_priority,
    )


def me_view(who: Identity, browser: bool) -> access_schemas.Me:
    """The caller. `browser`: identified by a browser session."""
    return access_schemas.Me(
        key=who.key_id,
        key_name=who.key_name,
        user=who.user,
        project=who.project,
        scope=who.scope,
        installation=who.installation,
        browser=browser,
        highest_priority=who.highest_priority,
    )


def audit_view(entry: access_tables.AuditEntry) -> access_schemas.AuditEntry:
    """An entry of the audit."""
    return access_schemas.AuditEntry(
        id=str(entry.id),
        time=moment(entry.time),
        project=entry.project,
        key=entry.key_id,
        key_name=entry.key_name,
        user=entry.user,
        operation=entry.operation,
        target=entry.target,
        address=entry.address,
        status=entry.status,
        code=entry.code,
    )
