"""What each operation requires of the caller's key: the one table that requests are checked against, and that the API's
description is generated from. An operation without an entry is always refused."""

from __future__ import annotations

from dataclasses import dataclass

from manta.service.identity import Identity, Scope

LINK_PATH = "/link/"
"""Path prefix of one-time links."""
DASHBOARD_PATH = "/ui"
"""Path of the dashboard."""
PROBED = frozenset({"/healthz", "/readyz"})


@dataclass(frozen=True)
class RequiredPermission:
    """What a key must permit."""

    scope: Scope
    """The least scope."""
    installation: bool = False
    """Whether the key must be for the whole installation."""

    def is_met_by(self, identity: Identity) -> bool:
        """Whether `identity` is permitted."""
        return identity.scope.covers(self.scope) and (identity.installation or not self.installation)

    def __str__(self) -> str:
        return f"{self.scope}{' for the whole installation' if self.installation else ''}"


_READ, _SUBMIT, _ADMIN = (
    RequiredPermission(Scope.READ),
    RequiredPermission(Scope.SUBMIT),
    RequiredPermission(Scope.ADMIN),
)
_INSTALLATION = RequiredPermission(Scope.ADMIN, installation=True)

NEEDS: dict[str, RequiredPermission] = {
    "submit_job": _SUBMIT,
    "list_jobs": _READ,
    "count_jobs": _READ,
    "list_sparklines": _READ,
    "get_job": _READ,
    "edit_job": _SUBMIT,
    "delete_job": _SUBMIT,
    "cancel_job": _SUBMIT,
    "pause_job": _SUBMIT,
    "resume_job": _SUBMIT,
    "retry_job": _SUBMIT,
    "resize_job": _SUBMIT,
    "get_metrics": _READ,
    "list_job_events": _READ,
    "list_events": _READ,
    "list_logs": _READ,
    "list_ranks": _READ,
    "get_rank_history": _READ,
    "get_expert_tokens": _READ,
    "get_waits": _READ,
    "get_rank_stack": _READ,
    "get_job_spec": _READ,
    "list_checkpoints": _READ,
    "delete_checkpoint": _SUBMIT,
    "export_checkpoint": _SUBMIT,
    "list_exports": _READ,
    "get_export": _READ,
    "get_ledger": _READ,
    "get_job_plan": _READ,
    "get_job_plan_picture": _READ,
    "list_machines": _READ,
    "list_recoveries": _READ,
    "request_trace": _SUBMIT,
    "list_traces": _READ,
    "get_trace": _READ,
    "get_trace_for_perfetto": _READ,
    "get_profile": _READ,
    "get_budget": _READ,
    "inject_fault": _ADMIN,
    "get_cluster": _READ,
    "check_cluster": _INSTALLATION,
    "drain_node": _INSTALLATION,
    "undrain_node": _INSTALLATION,
    "make_plans": _READ,
    "create_project": _INSTALLATION,
    "list_projects": _READ,
    "create_key": _ADMIN,
    "list_keys": _ADMIN,
    "revoke_key": _ADMIN,
    "list_audit": _ADMIN,
    "create_link": _READ,
    "get_me": _READ,
    "end_session": _READ,
    "get_prometheus_metrics": _READ,
}
"""Requirements by operation."""
DASHBOARD, DESCRIPTION = "to_dashboard", "get_description"
"""Names of the routes that are not operations: the redirect from the service's address to the dashboard, and the
description of operations."""


def needs(operation: str) -> RequiredPermission | None:
    """What an operation requires; None if it is never permitted."""
    return _READ if operation in (DASHBOARD, DESCRIPTION) else NEEDS.get(operation)


def shown(path: str) -> str:
    """`path` in a form that may be logged: without the secret of a link."""
    return f"{LINK_PATH}..." if path.startswith(LINK_PATH) else path


def is_anonymous(path: str) -> bool:
    """Whether `path` answers without a key. No others do."""
    return path in PROBED or path.startswith(LINK_PATH)
