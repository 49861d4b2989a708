"""How a database becomes one of a release before."""

UNDO_0012 = (
    "DROP TABLE exports",
    "DROP TABLE rank_numbers",
    "DROP TABLE job_labels",
    "DROP INDEX ix_jobs_owner_id",
    "ALTER TABLE jobs DROP COLUMN owner",
    "DROP TABLE step_trace_parts",
    "DROP TABLE step_traces",
    "DROP INDEX ix_jobs_state_priority_id",
    "DROP TABLE metric_bins",
    "ALTER TABLE jobs DROP COLUMN binned_until",
    "ALTER TABLE jobs DROP COLUMN binned_generation",
)
UNDO_0010 = (
    *UNDO_0012,
    *(f"DROP TABLE {table}" for table in ("control_planes", "leases")),
    "ALTER TABLE installation DROP COLUMN home",
    *(f"DROP TABLE {table}" for table in ("audit", "browser_tokens", "api_keys", "projects")),
    *(f"DROP INDEX ix_jobs_{columns}" for columns in ("project_id", "project_state_id")),
    "ALTER TABLE jobs DROP COLUMN project",
)
"""Statements that leave what migration 0010 found, of the newest schema."""
